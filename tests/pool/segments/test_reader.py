"""Which pages are checked, and what a reader makes of their bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.layout import (
    HEADER,
    HEADER_BYTES,
    HEADERS_OFFSET,
    Description,
    Header,
    PageFlag,
    PageRef,
    SlotState,
    carve,
    crc32c,
    header_offset,
    pack_description,
    pack_header,
)
from ems.pool.segments.reader import SAMPLE, LeasedPages, PageReader, Trust, Verify, policy_named
from ems.transfers.plan import Slots
from tests.kit.headers import write_header, write_state

PAGE = 4096
KEY = bytes(range(16))


def header(stamp: int = 5, flags: int = PageFlag.CHECKSUMMED) -> Header:
    return Header(SlotState.PRESENT, 1, KEY, bytes(16), stamp, PAGE, 0, flags)


@given(st.sampled_from(Verify), st.integers(0, 9), st.integers(0, 9), st.sampled_from(range(4)), st.integers(0, 99))
def test_what_is_checked(policy: Verify, since: int, stamp: int, flags: int, loaded: int) -> None:
    headers = np.frombuffer(pack_header(header(stamp, flags)), HEADER)
    (due,) = Trust(policy, since).due(headers, np.array([loaded]))
    if not flags & PageFlag.CHECKSUMMED:
        assert not due
    elif stamp < since or flags & PageFlag.FROM_BELOW or policy is Verify.ALWAYS:
        assert due
    else:
        assert due == (policy is Verify.SAMPLED and loaded % SAMPLE == 0)


@pytest.mark.parametrize(("name", "policy"), [("always", Verify.ALWAYS), ("", Verify.SAMPLED), ("new", Verify.SAMPLED)])
def test_a_policy_that_is_not_known_is_sampling(name: str, policy: Verify) -> None:
    assert policy_named(name) is policy


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(memoryview(b"123456789")) == 0xE3069283
    assert crc32c(memoryview(bytearray(32))) == 0x8A9136AA


class Memory:
    """One segment with one page in it."""

    def __init__(self) -> None:
        self.geometry = carve(1 << 20, PAGE)
        self.segment = memoryview(bytearray(1 << 20))
        self.describe("a", 1)
        self.ref = PageRef(0, 3, 1)
        begin = self.geometry.slot_offset(3)
        self.page = self.segment[begin : begin + PAGE]
        self.page[:] = b"x" * PAGE
        write_header(self.segment, 3, header()._replace(checksum=crc32c(self.page)))

    def describe(self, name: str, carving: int) -> None:
        description = Description(0, name, bytes(16), self.geometry, carving, 1)
        self.segment[:4096] = pack_description(description)

    def reader(self, name: str = "a", policy: Verify = Verify.ALWAYS) -> PageReader:
        return PageReader(lambda _: self.segment, name, PAGE, Trust(policy))

    def looked(self, reader: PageReader, count: int = 1) -> LeasedPages:
        """The page, promised ``count`` times."""
        return reader.look(self.ref.pack() * count, KEY * count)


def test_a_right_page_is_sound() -> None:
    memory = Memory()
    reader = memory.reader()
    pages = memory.looked(reader, 3)
    assert pages.present == reader.sound(pages, 0, 3) == reader.same(pages, 0, 3) == 3
    assert reader.page(memory.ref) == memory.page
    assert pages.starts.tolist() == Slots.of([memory.page] * 3).starts.tolist()
    assert not reader.corrupt


@given(st.integers(0, PAGE * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    memory = Memory()
    memory.page[bit // 8] ^= 1 << bit % 8
    reader = memory.reader()
    pages = memory.looked(reader, 2)
    assert pages.present == 2
    assert reader.sound(pages, 0, 2) == 0
    assert reader.corrupt == [(KEY, memory.ref)]
    assert reader.sound(memory.looked(memory.reader(policy=Verify.NEVER)), 0, 1) == 1


@given(st.integers(24 * 8, HEADER_BYTES * 8 - 1))
def test_a_header_that_is_damaged_vouches_for_nothing(bit: int) -> None:
    """Also where nothing is checked: it may say of a damaged page that it has no checksum."""
    memory = Memory()
    memory.segment[header_offset(3) + bit // 8] ^= 1 << bit % 8
    reader = memory.reader(policy=Verify.NEVER)
    assert reader.sound(memory.looked(reader), 0, 1) == 0
    assert reader.corrupt == [(KEY, memory.ref)]


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_that_says_something_else_after_the_copy_is_noticed(bit: int) -> None:
    memory = Memory()
    reader = memory.reader()
    pages = memory.looked(reader, 2)
    memory.segment[header_offset(3) + bit // 8] ^= 1 << bit % 8
    assert reader.same(pages, 0, 2) == 0
    assert reader.same(pages, 1, 2) == 1


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 40), st.integers(1, 2), st.booleans()), max_size=8)
)
def test_pages_are_there_up_to_the_first_that_is_not(asked: list[tuple[int, int, int, bool]]) -> None:
    """Segment 0 has the page, 1 is another namespace's, 2 is as small as a segment can be; slots may not exist."""
    memory, other = Memory(), Memory()
    other.describe("b", 1)
    small = memoryview(bytearray(memory.segment[: HEADERS_OFFSET + 4 * HEADER_BYTES]))
    segments = [memory.segment, other.segment, small]
    reader = PageReader(lambda number: segments[number], "a", PAGE, Trust(Verify.ALWAYS))
    refs = [PageRef(segment, slot, generation) for segment, slot, generation, _ in asked]
    keys = [KEY if right else bytes(16) for *_, right in asked]
    each = [ref == memory.ref and key == KEY for ref, key in zip(refs, keys, strict=True)]
    found = reader.look(b"".join(map(PageRef.pack, refs)), b"".join(keys))
    assert found.present == next((at for at, there in enumerate(each) if not there), len(each))
    assert reader.corrupt == [(keys[at], refs[at]) for at in range(found.present, len(refs))][:1]


def test_a_page_that_changed_hands_is_reported_by_nobody() -> None:
    memory = Memory()
    reader = memory.reader()
    pages = memory.looked(reader)
    memory.page[0] ^= 1
    write_state(memory.segment, 3, SlotState.FREE)
    assert reader.sound(pages, 0, 1) == 0
    assert not reader.corrupt


def test_pages_of_another_namespace_are_none_also_when_the_segment_is_carved_anew() -> None:
    memory = Memory()
    assert not memory.looked(memory.reader("b")).present
    reader = memory.reader()
    pages = memory.looked(reader)
    assert pages.present == reader.same(pages, 0, 1) == 1
    memory.describe("b", 2)
    assert reader.same(pages, 0, 1) == memory.looked(reader).present == 0
    memory.describe("a", 3)
    assert memory.looked(reader).present == 1


def test_sampling_finds_a_bad_page_after_some_loads() -> None:
    memory = Memory()
    memory.page[0] ^= 1
    reader = memory.reader(policy=Verify.SAMPLED)
    pages = memory.looked(reader, SAMPLE)
    assert [reader.sound(pages, at, at + 1) - at for at in range(SAMPLE)].count(False) == 1
    assert [reader.sound(memory.looked(reader), 0, 1) for _ in range(SAMPLE)].count(False) == 1
