"""What a host lends is touched before anybody's pages come there, and nothing else is."""

from __future__ import annotations

import ctypes
import mmap

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.tiers.cluster.lent_memory import LEAST_BYTES, LentMemory, _added
from tests.kit.waiting import until


def address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def resident(mapped: mmap.mmap) -> int:
    """Bytes of ``mapped`` that are in memory."""
    pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address_of(mapped)), ctypes.c_size_t(len(mapped)), pages) == 0
    return sum(one & 1 for one in pages) * mmap.PAGESIZE


def private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_what_was_mapped_meanwhile_is_touched_and_nothing_else() -> None:
    memory, before = LentMemory(), private(LEAST_BYTES)
    with memory.allocated(LEAST_BYTES):
        lent = private(LEAST_BYTES)
    lent[7] = 42
    until(lambda: resident(lent) == LEAST_BYTES, "it is touched", 60)
    assert lent[7] == 42
    assert lent[8] == 0
    assert resident(before) < LEAST_BYTES


def test_little_is_left_alone_and_an_end_of_memory_ends_no_thread() -> None:
    memory = LentMemory()
    with memory.allocated(LEAST_BYTES - 1):
        small = private(LEAST_BYTES)
    with memory.allocated(LEAST_BYTES):
        gone = private(LEAST_BYTES)
    gone.close()
    with memory.allocated(LEAST_BYTES):
        lent = private(LEAST_BYTES)
    until(lambda: resident(lent) == LEAST_BYTES, "it is touched", 60)
    assert resident(small) < len(small)


RANGES = st.lists(st.integers(0, 40), max_size=8, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(RANGES, RANGES)
def test_what_was_added_is_what_is_there_and_was_not(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    def pages(ranges: list[tuple[int, int]]) -> set[int]:
        return {page for start, end in ranges for page in range(start, end)}

    found = list(_added(before, after))
    assert pages(found) == pages(after) - pages(before)
    assert all(start < end for start, end in found)
