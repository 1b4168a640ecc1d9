"""What a host lends is touched before anybody's pages come there, and nothing else is."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from ems.pool.tiers.cluster.lent_memory import LEAST_BYTES, LentMemory
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


def test_what_was_mapped_meanwhile_is_touched() -> None:
    memory = LentMemory()
    with memory.allocated(LEAST_BYTES):
        lent = private(LEAST_BYTES)
    lent[7] = 42
    until(lambda: resident(lent) == LEAST_BYTES, "it is touched", 60)
    assert lent[7] == 42
    assert lent[8] == 0


def test_where_nothing_is_mapped_or_little_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr("ems.pool.tiers.cluster.lent_memory.warm", lambda view: touched.append(len(view)))
    memory, _before = LentMemory(), private(LEAST_BYTES)
    with memory.allocated(LEAST_BYTES):
        pass
    with memory.allocated(LEAST_BYTES - 1):
        _small = private(LEAST_BYTES)
    with memory.allocated(LEAST_BYTES):
        _lent = private(LEAST_BYTES)
    until(lambda: touched, "it is touched", 60)
    assert len(touched) == 1
    assert LEAST_BYTES <= touched[0] < 2 * LEAST_BYTES, "what lies beside it was there before"


def huge_pages(mapped: mmap.mmap) -> bool:
    """Whether the kernel was told to have them for ``mapped``: hg in what it says of that memory."""
    told = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (ours,) = (
        part
        for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", told)
        if (ends := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part))
        and int(ends[1], 16) <= address_of(mapped) < int(ends[2], 16)
    )
    return " hg" in ours[ours.index("VmFlags:") :]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    memory, other = LentMemory(), private(LEAST_BYTES)
    with memory.allocated(LEAST_BYTES):
        lent = private(LEAST_BYTES)
    until(lambda: resident(lent) == LEAST_BYTES, "it is touched", 60)
    assert huge_pages(lent)
    assert not huge_pages(other)


def test_an_end_of_memory_ends_no_thread() -> None:
    memory = LentMemory()
    with memory.allocated(LEAST_BYTES):
        gone = private(LEAST_BYTES)
    gone.close()
    with memory.allocated(LEAST_BYTES):
        lent = private(LEAST_BYTES)
    until(lambda: resident(lent) == LEAST_BYTES, "it is touched", 60)
