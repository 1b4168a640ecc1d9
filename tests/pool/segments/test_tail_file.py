"""Tokens of blocks that are not full, in a file: what was cut is lost and nothing else; it does not grow for ever."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import Tail
from ems.pool.segments import tail_file
from ems.pool.segments.tail_file import Listed, TailFile, pack_record, unpack_records

KEYS, REFS = st.binary(min_size=16, max_size=16), st.binary(min_size=20, max_size=20)
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
    return name, number.to_bytes(16, "little"), number.to_bytes(20, "little"), tail(number)


def test_it_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = TailFile(tmp_path / "tails")
    assert first.read() == []
    assert not (tmp_path / "tails").exists()
    first.add(*entry("a", 1))
    first.add(*entry("b", 2))
    first.add(*entry("a", 3))
    first.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("b", 2), entry("a", 3)]
    again.close()
    third = TailFile(tmp_path / "tails")
    third.read()
    third.add(*entry("c", 4))
    third.close()
    assert (tmp_path / "tails").stat().st_mode & 0o777 == 0o600
    fourth = TailFile(tmp_path / "tails")
    assert len(fourth.read()) == 4
    fourth.close()


@pytest.mark.parametrize("cut", [1, 30, 79])
def test_what_comes_behind_a_cut_record_is_found(tmp_path: Path, cut: int) -> None:
    file = TailFile(tmp_path / "tails")
    for number in range(3):
        file.add(*entry("a", number))
    file.close()
    os.truncate(tmp_path / "tails", (tmp_path / "tails").stat().st_size - cut)
    again = TailFile(tmp_path / "tails")
    kept = again.read()
    again.add(*entry("b", 9))
    again.close()
    third = TailFile(tmp_path / "tails")
    assert third.read() == [*kept, entry("b", 9)]
    assert len(kept) == (2 if cut < 50 else 1)
    third.close()


def test_a_record_that_fits_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TailFile(tmp_path / "tails")
    file.add(*entry("a", 1))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda to, data: write(to, data[:10]))
        with pytest.raises(OSError, match="No space"):
            file.add(*entry("b", 2))
    file.add(*entry("c", 3))
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("c", 3)]
    again.close()


def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_file, "_LEAST_BYTES", 1000)
    file = TailFile(tmp_path / "tails")
    for number in range(1000):
        if file.add(*entry("a", number)):
            file.rewrite([entry("a", number)])
    assert (tmp_path / "tails").stat().st_size < 1200
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read()[-1] == entry("a", 999)
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tails"]


def test_a_full_file_system_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TailFile(tmp_path / "tails")
    file.add(*entry("a", 1))

    def full(_file: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.rewrite([entry("a", 2)])
        with pytest.raises(OSError, match="No space"):
            file.add(*entry("a", 2))
    file.add(*entry("b", 3))
    file.close()
    again = TailFile(tmp_path / "tails")
    assert again.read() == [entry("a", 1), entry("b", 3)]
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tails"]
