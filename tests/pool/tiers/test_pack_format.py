"""The stored form of pages: what was written is read, what was changed is noticed."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import Tail
from ems.pool.layout import crc32c
from ems.pool.tiers.pack_format import (
    DATA_ALIGN,
    PREAMBLE_BYTES,
    RECORD,
    Head,
    Malformed,
    find_head,
    head_bytes,
    parse_head,
)
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.tiers import KEYS, key
from tests.pool.tiers.packed import named, packed

OTHERS = SealKeys(b"the secret of somebody else", encrypts=False)


def tail(number: int) -> Tail:
    return Tail(key(f"d{number}"), number.to_bytes(4, "little") * 3)


def pages(count: int) -> list[tuple[bytes, bytes]]:
    """Every third is not full."""
    return [(tail(n).key if n % 3 == 1 else key(n), key(n - 1)) for n in range(count)]


def tails(count: int) -> dict[int, Tail]:
    return {n: tail(n) for n in range(1, count, 3)}


def built(count: int = 5) -> Head:
    return packed(pages(count), tails=tails(count))


def whole(made: Head) -> bytes:
    return b"".join(made.around([bytes(10)] * len(made.records)))


def found_in(raw: bytes, keys: SealKeys | None = KEYS) -> tuple[Head, bool]:
    return find_head(lambda offset, count: raw[offset : offset + count], len(raw), named(), keys)


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(memoryview(bytearray(b"6789")), crc32c(b"12345")) == 0xE3069283


@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_what_was_built_is_read(count: int) -> None:
    raw = whole(built(count))
    assert head_bytes(raw[:PREAMBLE_BYTES]) <= len(raw)
    found, right = found_in(raw)
    assert right
    assert (found.namespace, found.page_size, found.stored_at) == ("t/m/l", 10, 12.5)
    assert found.seal is not None
    assert found.records["key"].tolist() == [one for one, _ in pages(count)]
    assert found.records["parent"].tolist() == [parent for _, parent in pages(count)]
    assert found.tails == tails(count)
    places = found.records["offset"].tolist()
    assert places[:1] == [0][:count]
    assert all(b - a == 10 for a, b in pairwise(places))
    assert found.data % DATA_ALIGN == 0
    assert raw[found.data : found.data + 10 * count] == bytes(10 * count)
    assert found.total == len(raw)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_was_built_says_what_is_read_later(count: int) -> None:
    said = built(count)
    found = parse_head(said.raw, named(), KEYS)
    assert said.records.tobytes() == found.records.tobytes()
    assert found.seal is not None
    assert said.raw == found.raw
    same = {"records": (), "seal": None}
    assert msgspec.structs.replace(said, **same) == msgspec.structs.replace(found, **same)


@pytest.mark.parametrize("keys", [None, OTHERS, SealKeys(b"a secret that all nodes of the tier have", encrypts=True)])
def test_without_the_key_a_head_is_read_and_not_believed(keys: SealKeys | None) -> None:
    found = parse_head(built().raw, named(), keys)
    assert found.seal is None
    assert found.tails == {}
    assert len(found.records) == 5


@given(st.data(), st.integers(0, 7))
def test_a_changed_byte_of_a_head_is_never_believed(data: st.DataObject, bit: int) -> None:
    raw = bytearray(built().raw)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << bit
    with pytest.raises(Malformed):
        parse_head(bytes(raw), named(), KEYS)


@given(st.data(), st.integers(0, 7), st.booleans())
def test_a_damaged_head_is_read_from_the_other_end(data: st.DataObject, bit: int, last: bool) -> None:
    made = built()
    raw = bytearray(whole(made))
    place = data.draw(st.integers(0, len(made.raw) - 1))
    raw[place - len(made.raw) if last else place] ^= 1 << bit
    found, right = found_in(bytes(raw))
    assert found.raw == made.raw
    assert right == last
    assert bytes(raw).endswith(made.last) != last


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        found_in(raw)


@given(st.integers(0, 900))
def test_a_cut_head_is_refused(size: int) -> None:
    raw = built().raw
    if size < len(raw):
        with pytest.raises(Malformed):
            found_in(raw[:size])


def test_a_pack_that_was_cut_is_not_whole() -> None:
    made = built()
    found, right = found_in(whole(made)[: made.data + 25])
    assert found.raw == made.raw
    assert not right


def test_records_of_another_pack_prove_nothing() -> None:
    one, other = built(), packed(pages(5)[::-1])
    table, others = one.records.tobytes(), other.records.tobytes()
    assert len(table) == 5 * RECORD.itemsize
    raw = one.raw.replace(table, others)
    before, body = raw[: PREAMBLE_BYTES - 4], raw[PREAMBLE_BYTES:]
    raw = before + crc32c(before + body).to_bytes(4, "little") + body
    assert parse_head(raw, named(), KEYS).seal is None


def test_a_head_that_is_nested_without_end_is_refused() -> None:
    """A reader that skips what it does not know would end by the depth of it."""
    raw = built().raw
    body = raw[PREAMBLE_BYTES : head_bytes(raw)]
    body = bytes([body[0] + 1]) + body[1:] + b"\x91" * 20_000 + b"\x90"
    before = raw[:16] + len(body).to_bytes(4, "little") + raw[20 : PREAMBLE_BYTES - 4]
    with pytest.raises(Malformed, match="makes no sense"):
        parse_head(before + crc32c(before + body).to_bytes(4, "little") + body, named(), KEYS)


def test_a_head_under_the_name_of_another_namespace_is_refused() -> None:
    with pytest.raises(Malformed, match="another namespace"):
        parse_head(built().raw, named("t/m/other"), KEYS)


def test_a_later_format_is_named() -> None:
    raw = bytearray(built().raw)
    raw[8] = 9
    with pytest.raises(Malformed, match="format version 9"):
        found_in(bytes(raw))
