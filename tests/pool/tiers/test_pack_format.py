"""The stored form of pages: what was written is read, what was changed is noticed."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers.pack_format import (
    DATA_ALIGN,
    PREAMBLE_BYTES,
    RECORD,
    Head,
    Malformed,
    head_bytes,
    parse_head,
    with_right_preamble,
)
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.tiers import KEYS, key
from tests.pool.tiers.packed import packed

NAME = len("t/m/l")
OTHERS = SealKeys(b"the secret of somebody else", encrypts=False)


def tail(number: int) -> Tail:
    return Tail(key(f"d{number}"), number.to_bytes(4, "little") * 3)


def pages(count: int) -> list[tuple[bytes, bytes]]:
    """Every third is not full."""
    return [(tail(n).key if n % 3 == 1 else key(n), key(n - 1)) for n in range(count)]


def tails(count: int) -> dict[int, Tail]:
    return {n: tail(n) for n in range(1, count, 3)}


def built(count: int = 5) -> tuple[bytes, bytes, Head]:
    return packed(pages(count), tails=tails(count))


def head(count: int = 5) -> bytes:
    return built(count)[0]


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(bytearray(b"6789")), crc32c(b"12345")) == 0xE3069283


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_what_was_built_is_read(count: int) -> None:
    raw = head(count)
    assert len(raw) % DATA_ALIGN == 0
    assert head_bytes(raw[:PREAMBLE_BYTES]) <= len(raw)
    found = parse_head(raw, KEYS)
    assert (found.namespace, found.page_size, found.stored_at) == ("t/m/l", 10, 12.5)
    assert found.seal is not None
    assert not found.damaged
    assert found.records["key"].tolist() == [one for one, _ in pages(count)]
    assert found.records["parent"].tolist() == [parent for _, parent in pages(count)]
    assert found.tails == tails(count)
    places = found.records["offset"].tolist()
    assert places[:1] == [len(raw)][:count]
    assert all(b - a == 10 for a, b in pairwise(places))
    assert found.total == len(raw) + 10 * count + NAME + PREAMBLE_BYTES


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_was_built_says_what_is_read_later(count: int) -> None:
    raw, _, said = built(count)
    found = parse_head(raw, KEYS)
    assert said.records.tobytes() == found.records.tobytes()
    assert found.seal is not None
    assert said.raw == found.raw
    same = {"records": (), "seal": None}
    assert msgspec.structs.replace(said, **same) == msgspec.structs.replace(found, **same)


@pytest.mark.parametrize("keys", [None, OTHERS, SealKeys(b"a secret that all nodes of the tier have", encrypts=True)])
def test_without_the_key_a_head_is_read_and_not_believed(keys: SealKeys | None) -> None:
    found = parse_head(head(), keys)
    assert found.seal is None
    assert found.tails == {}
    assert not found.damaged
    assert len(found.records) == 5


@given(st.data())
def test_a_changed_byte_costs_its_record_or_all_but_is_never_believed(data: st.DataObject) -> None:
    raw = bytearray(head())
    size = head_bytes(raw)
    place = data.draw(st.integers(0, size - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = parse_head(bytes(raw), KEYS)
    except Malformed:
        return
    assert found.damaged
    right = dict(pages(5))
    for position, record in enumerate(found.records):
        name = record["key"].tobytes()
        assert record["parent"].tobytes() == right[name]
        assert int(record["stored"]) == 10
        if position in found.tails:
            assert found.tails[position].key == name


@given(st.integers(0, PREAMBLE_BYTES + NAME - 1), st.integers(0, 7), st.booleans())
def test_a_damaged_preamble_is_read_from_the_other_end(place: int, bit: int, last: bool) -> None:
    begin, end, made = built()
    raw = bytearray(begin + bytes(50) + end)
    assert with_right_preamble(bytes(raw)) == (bytes(raw), True)
    raw[place - len(end) if last else place] ^= 1 << bit
    mended, whole = with_right_preamble(bytes(raw))
    assert not whole
    assert parse_head(mended, KEYS).raw == made.raw


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse_head(with_right_preamble(raw)[0], KEYS)


@given(st.integers(0, 900))
def test_a_cut_head_is_refused(size: int) -> None:
    raw = head()
    if size < head_bytes(raw):
        with pytest.raises(Malformed):
            parse_head(raw[:size], KEYS)


def test_records_of_another_pack_prove_nothing() -> None:
    one, other = bytearray(head()), packed(pages(5), namespace="t/m/other")[0]
    start, length = PREAMBLE_BYTES + NAME, RECORD.itemsize * 5
    other_start = PREAMBLE_BYTES + len("t/m/other")
    one[start : start + length] = other[other_start : other_start + length]
    assert len(parse_head(bytes(one), KEYS).records) == 0


def test_a_tail_under_the_key_of_another_page_is_left_out() -> None:
    raw = packed(pages(5), tails={0: tail(1), 1: tail(1)})[0]
    found = parse_head(raw, KEYS)
    assert found.tails == {1: tail(1)}
    assert found.damaged == 1


def test_a_later_format_is_named() -> None:
    raw = bytearray(head())
    raw[8] = 9
    with pytest.raises(Malformed, match="format version 9"):
        parse_head(bytes(raw), KEYS)
