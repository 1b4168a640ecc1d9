"""Which engine blocks belong to which chunk, and what a page says of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.vllm.offloading.chunks import TRAILER_BYTES, chunks_of, trailer, valid_from


@given(st.integers(0, 40), st.integers(0, 50), st.integers(1, 9))
def test_each_block_lies_in_the_chunk_and_at_the_place_of_its_number(count: int, index: int, blocks: int) -> None:
    ids = [1000 + number for number in range(count)]
    placed = {}
    for at, chunk in enumerate(chunks_of(ids, index, blocks)):
        assert chunk.block_ids
        for offset, block_id in enumerate(chunk.block_ids):
            assert chunk.first + offset < blocks
            placed[block_id] = (index // blocks + at) * blocks + chunk.first + offset
    assert placed == {1000 + number: index + number for number in range(count)}


def test_a_page_says_from_which_block_on_it_is_valid() -> None:
    page = bytearray(96 + TRAILER_BYTES)
    page[-TRAILER_BYTES:] = trailer(3)
    assert valid_from(memoryview(page)) == 3
