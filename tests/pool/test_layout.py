"""How segments are carved: nothing overlaps, nothing sticks out, little is wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.layout import (
    HEADER,
    HEADER_BYTES,
    HEADERS_OFFSET,
    PAGE_ALIGN,
    REF_BYTES,
    Description,
    Header,
    PageFlag,
    PageRef,
    SlotState,
    belongs_to,
    carve,
    carving_of,
    header_is_sound,
    header_offset,
    headers_are_sound,
    namespace_digest,
    pack_description,
    pack_header,
    refs_begin,
    unpack_description,
    unpack_header,
    unpack_refs,
)
from tests.kit.headers import write_header, write_state

SEGMENTS = st.integers(0, 1 << 34)
PAGES = st.integers(1, 1 << 26)
U32 = st.integers(0, 2**32 - 1)
REFS = st.builds(PageRef, U32, U32, U32)


@given(SEGMENTS, PAGES)
def test_headers_and_slots_lie_apart_within_the_segment(size: int, page: int) -> None:
    cut = carve(size, page)
    assert cut.slot_count >= 0
    if cut.slot_count == 0:
        return
    assert header_offset(cut.slot_count) <= cut.data_offset
    assert cut.slot_offset(0) == cut.data_offset
    assert cut.slot_offset(cut.slot_count - 1) + page <= size
    assert cut.slot_stride >= page
    assert cut.slot_offset(1) - cut.slot_offset(0) == cut.slot_stride


@given(SEGMENTS, PAGES)
def test_slots_are_aligned_for_whoever_copies(size: int, page: int) -> None:
    cut = carve(size, page)
    assert cut.data_offset % PAGE_ALIGN == 0
    assert cut.slot_stride % (PAGE_ALIGN if page >= 16 * PAGE_ALIGN else HEADER_BYTES) == 0
    assert cut.slot_stride - page < (PAGE_ALIGN if page >= 16 * PAGE_ALIGN else HEADER_BYTES)


@given(SEGMENTS, PAGES)
def test_not_one_more_slot_would_fit(size: int, page: int) -> None:
    cut = carve(size, page)
    more = cut.slot_count + 1
    table_end = -(-header_offset(more) // PAGE_ALIGN) * PAGE_ALIGN
    assert table_end + more * cut.slot_stride > size


@given(st.integers(1 << 16, 1 << 30), st.integers(1, 1 << 20), st.integers(0, 1 << 31))
def test_only_slots_that_were_touched_whole_count(size: int, page: int, touched: int) -> None:
    cut = carve(size, page)
    count = cut.slots_within(touched)
    assert 0 <= count <= cut.slot_count
    if count:
        assert cut.slot_offset(count - 1) + cut.slot_stride <= touched
    if count < cut.slot_count:
        assert cut.slot_offset(count) + cut.slot_stride > touched
    assert cut.slots_within(size) == cut.slot_count


@given(st.lists(REFS, max_size=5))
def test_references_survive_the_wire(refs: list[PageRef]) -> None:
    raw = b"".join(ref.pack() for ref in refs)
    assert len(raw) == REF_BYTES * len(refs)
    assert unpack_refs(raw) == refs
    assert [PageRef.unpack(ref.pack()) for ref in refs] == refs
    assert all(ref.pack().startswith(refs_begin(ref.segment)) for ref in refs)


KEYS = st.binary(min_size=16, max_size=16)
HEADERS = st.builds(
    Header, st.sampled_from(SlotState), U32, KEYS, KEYS, st.integers(0, 2**64 - 1), U32, U32, st.sampled_from(PageFlag)
)


@given(st.integers(0, 3), HEADERS)
def test_a_header_is_read_as_it_was_written(slot: int, header: Header) -> None:
    segment = bytearray(b"\xaa" * (HEADERS_OFFSET + 4 * HEADER_BYTES))
    before = bytes(segment)
    write_header(segment, slot, header)
    assert unpack_header(segment, header_offset(slot)) == header
    assert header_is_sound(segment, header_offset(slot))
    state, generation, key, *others, _ = np.frombuffer(segment, HEADER, 1, header_offset(slot))[0].tolist()
    assert Header(state, generation, key, *others) == header
    write_state(segment, slot, SlotState.FREE)
    assert unpack_header(segment, header_offset(slot)) == header._replace(state=SlotState.FREE)
    start, end = header_offset(slot), header_offset(slot + 1)
    assert segment[:start] == before[:start]
    assert segment[end:] == before[end:]


@given(st.lists(st.tuples(HEADERS, st.none() | st.integers(0, HEADER_BYTES * 8 - 1)), max_size=5))
def test_many_headers_are_checked_as_one_is(written: list[tuple[Header, int | None]]) -> None:
    raw = bytearray(b"".join(pack_header(header) for header, _ in written))
    for at, (_, flipped) in enumerate(written):
        if flipped is not None:
            raw[at * HEADER_BYTES + flipped // 8] ^= 1 << flipped % 8
    sound = [flipped is None for _, flipped in written]
    assert headers_are_sound(np.frombuffer(bytes(raw), HEADER)).tolist() == sound
    assert [header_is_sound(raw, at * HEADER_BYTES) for at in range(len(written))] == sound


@given(HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_header_passes(header: Header, bit: int) -> None:
    segment = bytearray(HEADERS_OFFSET + HEADER_BYTES)
    write_header(segment, 0, header)
    segment[HEADERS_OFFSET + bit // 8] ^= 1 << bit % 8
    assert not header_is_sound(segment, HEADERS_OFFSET)


NAMES = st.text(min_size=1, max_size=512)


@given(st.integers(0, 4095), NAMES, KEYS, st.integers(1, 1 << 20), st.integers(0, 2**64 - 1), U32)
def test_a_description_is_read_as_it_was_written(
    number: int, name: str, node: bytes, page: int, carving: int, generation: int
) -> None:
    name = name.encode(errors="replace").decode()
    description = Description(number, name, node, carve(64 << 20, page), carving, generation)
    raw = pack_description(description)
    assert len(raw) == HEADERS_OFFSET
    assert unpack_description(raw, 64 << 20) == description
    assert belongs_to(memoryview(raw), namespace_digest(name))
    assert carving_of(memoryview(raw)) == carving
    assert isinstance(unpack_description(raw, 32 << 20), str), "another size of the file"


@given(st.integers(0, HEADERS_OFFSET * 8 - 1))
def test_no_flipped_bit_of_a_description_passes(bit: int) -> None:
    raw = bytearray(pack_description(Description(1, "a", bytes(16), carve(1 << 20, 4096), 7, 1)))
    raw[bit // 8] ^= 1 << bit % 8
    assert isinstance(unpack_description(bytes(raw), 1 << 20), str)


def test_a_description_of_another_format_says_so() -> None:
    raw = bytearray(pack_description(Description(1, "a", bytes(16), carve(1 << 20, 4096), 7, 1)))
    raw[8] = 1
    reason = unpack_description(bytes(raw), 1 << 20)
    assert reason == "it has format 1, this release reads format 2"
    assert unpack_description(bytes(HEADERS_OFFSET), 1 << 20) is None


@pytest.mark.parametrize(
    ("page", "waste"), [(32 << 10, 0.01), (128 << 10, 0.01), (768 << 10, 0.02), (4 << 20, 0.07), (1, 0.995)]
)
def test_usual_pages_waste_little(page: int, waste: float) -> None:
    cut = carve(64 << 20, page)
    assert 1 - cut.slot_count * page / (64 << 20) < waste
