"""One segment as the node gets at it: by reads and writes of its file, which clients may cut short at any moment.

Whoever may write into a segment can also truncate its file, or take memory out of it, and no seal forbids that of a
file that outlives its node.  Memory that is mapped and gone ends the process that looks at it.  What always holds: no
byte of a segment is looked at through a mapping here, but where all clients are trusted (:meth:`SegmentFile.view`);
what cannot be read or written whole is said to be so, and remembered in :attr:`SegmentFile.hurt`; the file is open as
long as anybody, a thread that hangs too, refers to this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from ems.pool.segments.touch import populate

_CALL_BYTES = 1 << 30
"""Bytes that one system call moves; the kernel's own limit is 2 GiB less a page."""

Bytes = bytes | bytearray | memoryview


class SegmentFile:
    """The open file ``descriptor`` of a segment of ``size`` bytes; closes it when nobody refers to it any more.

    Its open file description is the node's own: one that is shared lets others change what writes mean (O_APPEND).
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.hurt = False
        """Whether something could not be read or written whole."""
        self._mapped: mmap.mmap | None = None
        self._close = weakref.finalize(self, os.close, descriptor)

    def opened(self) -> int:
        """A new descriptor of the file, of an open file description of its own, to be passed to a client and closed.

        Raises OSError: there is no descriptor left.
        """
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def read(self, offset: int, length: int) -> bytes | None:
        """``length`` bytes from ``offset`` on, a copy; None when they are not all there."""
        data = bytearray(length)
        return bytes(data) if self.read_into(offset, memoryview(data)) else None

    def read_into(self, offset: int, into: memoryview) -> bool:
        done = 0
        try:
            while done < len(into):
                count = os.preadv(self.descriptor, [into[done : done + _CALL_BYTES]], offset + done)
                if not count:
                    break
                done += count
        except OSError:
            done = -1
        self.hurt |= done < len(into)
        return done == len(into)

    def write(self, offset: int, data: Bytes) -> bool:
        left = memoryview(data)
        try:
            while left:
                count = os.pwrite(self.descriptor, left[:_CALL_BYTES], offset)
                left, offset = left[count:], offset + count
        except OSError:
            # A hole where there was memory, and no memory left to fill it.
            self.hurt = True
            return False
        return True

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes themselves, mapped; None when the file is too short for that.

        Only where nobody who can write into the segment would cut it: looking at what is gone ends the process.
        """
        if self._mapped is None:
            try:
                self._mapped = mmap.mmap(self.descriptor, self.size)
            except (OSError, ValueError):
                self.hurt = True
                return None
        return memoryview(self._mapped)[offset : offset + length]

    def touch(self, start: int, length: int, *, populated: bool) -> bool:
        """Have memory for ``length`` bytes from ``start`` on, and find it if ``populated``; whether that worked.

        False when somebody cut the file meanwhile.  Raises OSError: the system has no memory.
        """
        os.posix_fallocate(self.descriptor, start, length)
        if not populated:
            return True
        try:
            with mmap.mmap(self.descriptor, length, offset=start) as mapped:
                anchor = ctypes.c_char.from_buffer(mapped)
                try:
                    populate(ctypes.addressof(anchor), length)
                finally:
                    del anchor
        except (OSError, ValueError):
            if self.whole():
                raise
            self.hurt = True
            return False
        return True

    def whole(self) -> bool:
        return os.fstat(self.descriptor).st_size >= self.size

    def cut_back(self) -> bool:
        if os.fstat(self.descriptor).st_size <= self.size:
            return False
        os.ftruncate(self.descriptor, self.size)
        return True

    def allocated(self) -> int:
        return min(os.fstat(self.descriptor).st_blocks * 512, self.size)


class FileRange:
    """Bytes of a segment that a tier reads or fills on a thread; the file stays open with it."""

    def __init__(self, file: SegmentFile, offset: int, length: int, *, mapped: bool) -> None:
        self.file = file
        self.offset = offset
        self.mapped = mapped
        """Whether it may be looked at where it is, because all clients are trusted."""
        self.length = length

    def view(self) -> memoryview | None:
        """The bytes themselves if they are :attr:`mapped`; None where they are to be copied."""
        return self.file.view(self.offset, self.length) if self.mapped else None

    def read_into(self, into: memoryview) -> bool:
        return self.file.read_into(self.offset, into)

    def write(self, data: memoryview) -> bool:
        return self.file.write(self.offset, data)
