"""A page opens only as what it was sealed as, whoever put it into the cluster."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import Tail
from ems.pool.layout import crc32c
from ems.pool.movement.hot_list import MOST_RUN_KEYS, HotRun
from ems.pool.tiers.answers import StoredTail
from ems.pool.tiers.cluster import objects
from ems.pool.tiers.cluster.objects import (
    HEADER_BYTES,
    HOT_LIST_BYTES,
    LEAST_LISTING,
    MAX_LISTED,
    MAX_LISTING,
    Objects,
    ObjectSeal,
)
from ems.pool.tiers.pack_seal import NONCE_BYTES, TAG_BYTES, SealKeys

KEY, PARENT, PAGE = b"k" * 16, b"p" * 16, bytes(range(256)) * 4
SUM = crc32c(memoryview(PAGE))


def seal_of(namespace: str = "t/m/l", secret: bytes = b"secret" * 4) -> ObjectSeal:
    seal = Objects(SealKeys(secret, encrypts=False)).of(namespace)
    assert seal is not None
    return seal


def test_what_was_sealed_opens_and_says_what_it_is() -> None:
    header = seal_of().header(KEY, PARENT, PAGE, SUM)
    assert len(header) == HEADER_BYTES
    opened = seal_of().open(header, KEY, PAGE)
    assert opened is not None
    assert (opened.parent, opened.checksum) == (PARENT, SUM)


@given(position=st.integers(0, 83), bit=st.integers(0, 7))
def test_no_bit_of_a_header_can_be_changed(position: int, bit: int) -> None:
    header = bytearray(seal_of().header(KEY, PARENT, PAGE, SUM))
    before = bytes(header)
    header[position] ^= 1 << bit
    opened = seal_of().open(bytes(header), KEY, PAGE)
    flags = position in (10, 11)  # for releases to come; this one says nothing there
    assert (opened is not None) == flags
    assert seal_of().open(before, KEY, PAGE) is not None


@given(position=st.integers(0, len(PAGE) - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_page_can_be_changed(position: int, bit: int) -> None:
    header, page = seal_of().header(KEY, PARENT, PAGE, SUM), bytearray(PAGE)
    page[position] ^= 1 << bit
    assert seal_of().open(header, KEY, page) is None


def test_a_page_is_none_of_another_key_namespace_secret_or_size() -> None:
    header = seal_of().header(KEY, PARENT, PAGE, SUM)
    assert seal_of().open(header, b"x" * 16, PAGE) is None
    assert seal_of("u/m/l").open(header, KEY, PAGE) is None
    assert seal_of(secret=b"another secret of it").open(header, KEY, PAGE) is None
    assert seal_of().open(header, KEY, PAGE[:-1]) is None


def run_of(first: int, count: int) -> HotRun:
    return HotRun(PARENT, b"".join(number.to_bytes(16, "big") for number in range(first, first + count)))


def test_a_hot_list_says_what_was_listed_to_who_has_the_secret_alone() -> None:
    tail = Tail(b"d" * 16, b"abcd")
    runs = [run_of(0, 3), HotRun(KEY, bytes(tail.key), tail)]
    raw = seal_of().hot_list(runs)
    assert seal_of().hot_listed(raw) == runs
    assert seal_of("u/m/l").hot_listed(raw) is None
    assert seal_of(secret=b"another secret of it").hot_listed(raw) is None
    assert seal_of().hot_listed(b"") is seal_of().hot_listed(raw[:-1]) is None
    assert seal_of().listed(b"ems-hot-pages", raw) == [], "nor is it a list of tails"
    assert seal_of().hot_name != seal_of().listing_name(b"")


def test_a_hot_list_that_is_full_keeps_the_newest() -> None:
    runs = [run_of(100 * number, 100) for number in range(100)]
    raw = seal_of().hot_list(runs)
    listed = seal_of().hot_listed(raw)
    assert listed is not None
    assert HOT_LIST_BYTES - 2000 < len(listed) * 1600 <= HOT_LIST_BYTES
    assert listed == runs[-len(listed) :]
    assert len(raw) == len(seal_of().hot_list([])), "what replaces it has the same size"


@pytest.mark.parametrize(
    "told",
    [
        3,
        [3],
        [(PARENT, KEY[:-1])],
        [(PARENT, b"")],
        [(PARENT[:-1], KEY)],
        [(PARENT, KEY + b"x")],
        [(PARENT, KEY * 2)],
        [(PARENT, KEY, (b"d" * 16, b"abcd"))],
        [(PARENT, Tail(b"d" * 16, b"abc").key, (b"d" * 16, b"abc"))],
        [(PARENT, Tail(b"d" * 16, b"").key, (b"d" * 16, b""))],
        [(PARENT, Tail(b"d" * 15, b"abcd").key, (b"d" * 15, b"abcd"))],
        [(PARENT, KEY, None, b"1")],
        [(PARENT, KEY, None, 1, 1)],
        [(PARENT, KEY * (MOST_RUN_KEYS + 1))],
    ],
)
def test_a_hot_list_that_makes_no_sense_lists_nothing_whoever_sealed_it(told: object) -> None:
    """Without a secret anybody can seal."""
    encoded = msgspec.msgpack.encode(told)
    body = len(encoded).to_bytes(4, "little") + encoded
    nonce, tag, _ = seal_of()._seal.seal(body, b"ems-hot-pages")
    assert not seal_of().hot_listed(nonce + tag + body)


@pytest.mark.parametrize(
    "body",
    [
        b"no msgpack",
        msgspec.msgpack.encode([(b"abc", PARENT)]),
        msgspec.msgpack.encode([(b"", PARENT)]),
        msgspec.msgpack.encode([(bytes(160 << 10), PARENT)]),
        msgspec.msgpack.encode([(b"abcd", b"p")]),
        msgspec.msgpack.encode([("abcd", 3)]),
    ],
)
def test_a_list_that_makes_no_sense_lists_nothing_whoever_sealed_it(body: bytes) -> None:
    """Without a secret anybody can seal."""
    seal, directory = seal_of(), b"d" * 16
    nonce, tag, _ = seal._seal.seal(body, directory)
    assert seal.listed(directory, nonce + tag + body) == []


def test_names_of_different_things_differ_and_those_of_a_namespace_are_matched() -> None:
    mine, other = seal_of(), seal_of("u/m/l")
    names = {mine.name(KEY), mine.name(PARENT), mine.listing_name(KEY), other.name(KEY)}
    assert len(names) == 4
    assert re.match(mine.all_names, mine.name(KEY))
    assert re.match(mine.all_names, mine.listing_name(KEY))
    assert not re.match(mine.all_names, other.name(KEY))
    assert mine.name(KEY) != seal_of(secret=b"another secret of it").name(KEY)


def test_objects_of_another_format_are_neither_read_nor_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = seal_of()
    monkeypatch.setattr(objects, "FORMAT_VERSION", objects.FORMAT_VERSION + 1)
    newer = seal_of()
    header = newer.header(KEY, PARENT, PAGE, SUM)
    assert newer.open(header, KEY, PAGE) is not None
    monkeypatch.undo()
    assert mine.open(header, KEY, PAGE) is None
    for name in (newer.name(KEY), newer.listing_name(KEY)):
        assert name not in {mine.name(KEY), mine.listing_name(KEY)}
        assert not re.match(mine.all_names, name)


def test_a_namespace_whose_tenant_has_no_secret_has_no_seal() -> None:
    assert Objects(SealKeys(None, {"a": b"s" * 16}, encrypts=False)).of("b/m/l") is None


def tails(count: int) -> list[StoredTail]:
    return [StoredTail(Tail(b"d" * 16, bytes([number]) * 8), PARENT) for number in range(count)]


def test_a_list_of_tails_is_read_as_it_was_written() -> None:
    raw = seal_of().listing(b"d" * 16, tails(3))
    assert seal_of().listed(b"d" * 16, raw) == tails(3)


def test_the_newest_tails_stay_in_a_list() -> None:
    raw = seal_of().listing(b"d" * 16, tails(MAX_LISTED + 5))
    assert seal_of().listed(b"d" * 16, raw) == tails(MAX_LISTED + 5)[5:]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=MAX_LISTED))
def test_lists_have_few_sizes(tokens: list[int]) -> None:
    """Mooncake keeps the memory of what is replaced by another size for ten minutes, in which nobody else has it."""
    listed = [StoredTail(Tail(b"d" * 16, bytes(8 * count)), PARENT) for count in tokens]
    raw = seal_of().listing(b"d" * 16, listed)
    sealed = len(raw) - NONCE_BYTES - TAG_BYTES
    assert sealed in {LEAST_LISTING << power for power in range(7)} | {MAX_LISTING // 2, MAX_LISTING // 2 + 2}
    assert sealed < 2 * max(8 * sum(tokens) + 500 + 40 * len(tokens), LEAST_LISTING)
    found = seal_of().listed(b"d" * 16, raw)
    assert found == listed[-len(found) :]


def test_a_list_that_is_huge_is_cut_to_what_is_read() -> None:
    large = [StoredTail(Tail(b"d" * 16, bytes([number]) * (60 << 10)), PARENT) for number in range(8)]
    found = seal_of().listed(b"d" * 16, seal_of().listing(b"d" * 16, large))
    assert found == large[-len(found) :]
    assert 2 <= len(found) < 8


@given(raw=st.binary(max_size=200))
def test_a_list_that_nobody_sealed_lists_nothing(raw: bytes) -> None:
    assert seal_of().listed(b"d" * 16, raw) == []


def test_a_list_is_that_of_its_directory() -> None:
    assert seal_of().listed(b"e" * 16, seal_of().listing(b"d" * 16, tails(1))) == []
