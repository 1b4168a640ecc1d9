"""First touch of memory, away from whoever needs the memory.

The first touch of shared memory costs ten times a copy, because the kernel must find and clear a page.  The
node touches its segments once; each engine then only fills its own page tables, again before it needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time

TOUCH_STEP = 8 << 20
"""Bytes touched in one go; small, so that a stop is obeyed at once."""

_POPULATE_WRITE = 23
_PIPED = 512
"""Bytes that go through a pipe at a time: less than any pipe holds, and than one call takes pieces."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

REST = 3.0
"""How long :func:`warm` rests after a step, in times of what the step took."""
MOST_REST = 0.5


def yield_to_others() -> None:
    """Give the calling thread the lowest priority: engines need the cores more.

    Not for a thread of an engine: while it touches memory it holds the process's memory map, and on a busy host a
    thread of the lowest priority keeps all others of the process waiting for that.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid even that; it is a courtesy
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def populate(address: int, length: int) -> None:
    """Touch ``length`` bytes at ``address`` (both in whole memory pages) without changing them.

    The interpreter is free meanwhile.  Raises OSError: the kernel refused, for one because the file system is full.
    """
    if _libc.madvise(address, length, _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    # Kernels before 5.14 do not know the advice. Reading a byte a page finds the page as well; writing it back
    # would undo what another process wrote in between. The kernel does the reading: where memory is gone because
    # somebody cut the file it says so, and a read of our own would end the process.
    view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
    bytes_ = [view[offset : offset + 1] for offset in range(0, length, mmap.PAGESIZE)]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        for first in range(0, len(bytes_), _PIPED):
            some = bytes_[first : first + _PIPED]
            if os.writev(writing, some) < len(some):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            os.read(reading, len(some))
    finally:
        os.close(reading)
        os.close(writing)


def prefer_huge_pages(buffer: memoryview) -> None:
    """Have memory of no file touched in pages of 2 MiB where the kernel has them: that takes a seventh of the time."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    _libc.madvise(address, len(buffer), mmap.MADV_HUGEPAGE)  # where it refuses they are small


def warm(buffer: memoryview) -> None:
    """Fill this process's page tables for a mapped segment, step by step, with rests in which others have the core.

    Raises OSError: the kernel refused, for one because the file system is full.
    """
    anchor = ctypes.c_char.from_buffer(buffer)
    address = ctypes.addressof(anchor)
    for start in range(0, len(buffer), TOUCH_STEP):
        begin = time.perf_counter()
        populate(address + start, min(TOUCH_STEP, len(buffer) - start))
        time.sleep(min((time.perf_counter() - begin) * REST, MOST_REST))  # others have the core meanwhile


def punch(descriptor: int, length: int, start: int = 0) -> None:
    """Free the memory of ``length`` bytes of a file from ``start`` on, whoever maps it: they are zeros from now on.

    Unlike a shorter file, one with a hole ends nobody who still reads or writes there.  Raises OSError: the file system
    cannot do that.
    """
    if _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, length):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
