"""The stored form of pages: what was written is read, what was changed is noticed."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers.record import (
    DATA_ALIGN,
    PREAMBLE_BYTES,
    Entry,
    Malformed,
    build_head,
    head_bytes,
    parse_head,
)
from ems.testing.tiers import key


def no_key(_sealed: bytes, _namespace: str, _salt: bytes) -> None:
    return None


def entries(count: int, *, tails: bool = True) -> list[Entry]:
    made = []
    for number in range(count):
        tail = Tail(key(f"d{number}"), number.to_bytes(4, "little") * 3) if tails and number % 3 == 1 else None
        made.append(Entry(key(number), key(number - 1), tail, 100 + number, 100 + number, 0, number, number))
    return made


def head(count: int = 5) -> bytes:
    return build_head("t/m/l", 4096, key("id"), 12.5, entries(count), None)[0]


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(bytearray(b"6789")), crc32c(b"12345")) == 0xE3069283


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_what_was_built_is_read(count: int) -> None:
    raw = head(count)
    assert len(raw) % DATA_ALIGN == 0
    assert head_bytes(raw[:PREAMBLE_BYTES]) <= len(raw)
    found = parse_head(raw, no_key)
    assert (found.namespace, found.page_size, found.pack_id, found.stored_at) == ("t/m/l", 4096, key("id"), 12.5)
    assert not found.damaged
    assert found.records["key"].tolist() == [one.key for one in entries(count)]
    assert found.records["parent"].tolist() == [one.parent for one in entries(count)]
    assert found.tails == {place: one.tail for place, one in enumerate(entries(count)) if one.tail is not None}
    places = found.records["offset"].tolist()
    assert places[:1] == [len(raw)][:count]
    assert all(b - a == 100 + number for number, (a, b) in enumerate(pairwise(places)))
    assert found.total == len(raw) + sum(100 + number for number in range(count))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_was_built_says_what_is_read_later(count: int) -> None:
    raw, said = build_head("t/m/l", 4096, key("id"), 12.5, entries(count), None)
    found = parse_head(raw, no_key)
    assert said.records.tobytes() == found.records.tobytes()
    assert msgspec.structs.replace(said, records=()) == msgspec.structs.replace(found, records=())


@given(st.data())
def test_a_changed_byte_costs_its_record_or_all_but_is_never_believed(data: st.DataObject) -> None:
    raw = bytearray(head())
    size = head_bytes(raw)
    place = data.draw(st.integers(0, size - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = parse_head(bytes(raw), no_key)
    except Malformed:
        return
    assert found.damaged
    right = {one.key: one for one in entries(5)}
    for position, record in enumerate(found.records):
        one = right[record["key"].tobytes()]
        assert record["parent"].tobytes() == one.parent
        assert int(record["stored"]) == one.stored
        if found.tails:
            assert found.tails.get(position) == one.tail


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse_head(raw, no_key)


@given(st.integers(0, 900))
def test_a_cut_head_is_refused(size: int) -> None:
    raw = head()
    if size < head_bytes(raw):
        with pytest.raises(Malformed):
            parse_head(raw[:size], no_key)


def test_records_of_another_pack_prove_nothing() -> None:
    one, other = bytearray(head()), build_head("t/m/other", 4096, key("id2"), 1.0, entries(5), None)[0]
    start = PREAMBLE_BYTES + len("t/m/l")
    other_start = PREAMBLE_BYTES + len("t/m/other")
    one[start : start + 96 * 5] = other[other_start : other_start + 96 * 5]
    found = parse_head(bytes(one), no_key)
    assert len(found.records) == 0


def test_a_later_format_is_named() -> None:
    raw = bytearray(head())
    raw[8] = 9
    with pytest.raises(Malformed, match="format version 9"):
        parse_head(bytes(raw), no_key)
