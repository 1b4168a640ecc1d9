"""Tokens of blocks that are not full, in a file: what was cut is lost and nothing else; it does not grow for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import Tail
from ems.pool.layout import REF_BYTES
from ems.pool.segments import tail_file
from ems.pool.segments.tail_file import STEP_RECORDS, Listed, TailFile, pack_record, unpack_records

MOST = 1 << 20
KEYS, REFS = st.binary(min_size=16, max_size=16), st.binary(min_size=REF_BYTES, max_size=REF_BYTES)
TOKENS = st.binary(min_size=4, max_size=64).map(lambda raw: raw[: len(raw) // 4 * 4])
LISTED = st.lists(st.tuples(st.text(min_size=1, max_size=20), KEYS, REFS, st.builds(Tail, KEYS, TOKENS)), max_size=8)


def encodable(listed: list[Listed]) -> list[Listed]:
    return [(name.encode(errors="replace").decode(), key, ref, tail) for name, key, ref, tail in listed]


@given(LISTED.map(encodable), st.integers(0, 400))
def test_what_was_cut_is_lost_and_nothing_else(listed: list[Listed], cut: int) -> None:
    records = [pack_record(*one) for one in listed]
    raw = b"".join(records)
    assert unpack_records(raw) == (listed, len(raw))
    kept, size = 0, 0
    while kept < len(records) and size + len(records[kept]) <= len(raw) - cut:
        size += len(records[kept])
        kept += 1
    assert unpack_records(raw[: max(len(raw) - cut, 0)])[0] == listed[:kept]


@given(LISTED.map(encodable), st.binary(max_size=40), st.integers(0, 400))
def test_no_bytes_bring_it_down_or_pass_for_tokens(listed: list[Listed], garbage: bytes, at: int) -> None:
    raw = bytearray(b"".join(pack_record(*one) for one in listed))
    raw[at : at + len(garbage)] = garbage
    found, _ = unpack_records(bytes(raw))
    assert found == listed[: len(found)] or all(one in listed for one in found)


def tail(number: int) -> Tail:
    return Tail(bytes(16), number.to_bytes(4, "little"))


def entry(name: str, number: int) -> Listed:
    """What is stored of one page."""
    return name, number.to_bytes(16, "little"), number.to_bytes(REF_BYTES, "little"), tail(number)


def test_it_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = TailFile(tmp_path / "tails")
    assert first.read() == []
    assert not (tmp_path / "tails").exists()
    first.add(*entry("a", 1), MOST)
    first.add(*entry("b", 2), MOST)
    first.add(*entry("a", 3), MOST)
    first.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("b", 2), entry("a", 3)]
    again.close()
    third = TailFile(tmp_path / "tails")
    third.read()
    third.add(*entry("c", 4), MOST)
    third.close()
    assert (tmp_path / "tails").stat().st_mode & 0o777 == 0o600
    fourth = TailFile(tmp_path / "tails")
    assert len(fourth.read()) == 4
    fourth.close()


@pytest.mark.parametrize("cut", [1, 30, 79])
def test_what_comes_behind_a_cut_record_is_found(tmp_path: Path, cut: int) -> None:
    file = TailFile(tmp_path / "tails")
    for number in range(3):
        file.add(*entry("a", number), MOST)
    file.close()
    os.truncate(tmp_path / "tails", (tmp_path / "tails").stat().st_size - cut)
    again = TailFile(tmp_path / "tails")
    kept = again.read()
    again.add(*entry("b", 9), MOST)
    again.close()
    third = TailFile(tmp_path / "tails")
    assert third.read() == [*kept, entry("b", 9)]
    assert len(kept) == (2 if cut < 50 else 1)
    third.close()


def test_a_record_that_fits_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TailFile(tmp_path / "tails")
    file.add(*entry("a", 1), MOST)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda to, data: write(to, data[:10]))
        with pytest.raises(OSError, match="No space"):
            file.add(*entry("b", 2), MOST)
    file.add(*entry("c", 3), MOST)
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("c", 3)]
    again.close()


def living(*numbers: int) -> Callable[[str, bytes, bytes], bool]:
    keys = {entry("a", number)[1] for number in numbers}
    return lambda _name, key, _ref: key in keys


def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_file, "LEAST_BYTES", 1000)
    file = TailFile(tmp_path / "tails")
    file._compact_above = 1000
    for number in range(1000):
        file.compact(living(max(number - 1, 0)), MOST)
        file.add(*entry("a", number), MOST)
        assert (tmp_path / "tails").stat().st_size < 1200
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read()[-1] == entry("a", 999)
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tails"]


def test_it_is_written_anew_in_steps_and_what_is_added_meanwhile_is_kept(tmp_path: Path) -> None:
    file = TailFile(tmp_path / "tails")
    count = 20 * STEP_RECORDS
    for number in range(count):
        file.add(*entry("a", number), MOST)
    file._compact_above = 0
    kept = range(0, count + 100, 7)
    steps, added, asked = 0, count, 0

    def lives(name: str, key: bytes, ref: bytes) -> bool:
        nonlocal asked
        asked += 1
        return living(*kept)(name, key, ref)

    while steps < 2 or file._new >= 0:
        asked, steps = 0, steps + 1
        file.compact(lives, MOST)
        assert asked <= STEP_RECORDS
        file.add(*entry("a", added), MOST)
        added += 1
    file.close()
    again = TailFile(tmp_path / "tails")
    found = again.read()
    again.close()
    assert steps > 20
    assert [one for one in found if one[1] in {entry("a", number)[1] for number in kept}] == [
        entry("a", number) for number in kept if number < added
    ]
    assert len(found) < count // 2


def test_it_has_a_bound_and_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    file = TailFile(tmp_path / "tails")
    most, refused = 20_000, 0
    for number in range(1000):
        file.compact(living(*range(number)), most)
        with suppress(OSError):
            file.add(*entry("a", number), most)
            continue
        refused += 1
        assert (tmp_path / "tails").stat().st_size <= most
    assert refused > 500
    for _ in range(1000):
        file.compact(living(1, 2), most)
    file.add(*entry("a", 5), most)
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("a", 2), entry("a", 5)]
    again.close()


def test_one_that_is_of_use_as_a_whole_is_not_written_anew_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than half of what the file may hold is of use, and a little is added."""
    monkeypatch.setattr(tail_file, "LEAST_BYTES", 0)
    file = TailFile(tmp_path / "tails")
    record = len(pack_record(*entry("a", 0)))
    most = 1000 * record
    renamed = 0
    rename = file._rename

    def counted(new: Path) -> None:
        nonlocal renamed
        renamed += 1
        rename(new)

    monkeypatch.setattr(file, "_rename", counted)
    for number in range(900):
        file.compact(lambda *_: True, most)
        file.add(*entry("a", number), most)
    assert renamed <= 16
    assert len(file.read()) == 900
    file.close()


def test_a_full_file_system_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TailFile(tmp_path / "tails")
    file.add(*entry("a", 1), MOST)
    file._compact_above = 0

    def full(_file: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.compact(living(1), MOST)
        with pytest.raises(OSError, match="No space"):
            file.add(*entry("a", 2), MOST)
    file.add(*entry("b", 3), MOST)
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("b", 3)]
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tails"]
