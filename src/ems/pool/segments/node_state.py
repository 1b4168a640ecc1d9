"""What a node knows of its segments that nobody who maps them can change, kept for the node that comes after it.

The size of their files, and how far the numbers that grow (stamps of pages, carvings of segments) have come at most.  A
client can write any number into its own segments: without a bound the next node would go on from there, and the one
after it would take the pages of everybody for damaged.  What always holds: no stamp and no carving is given that is
not below what the file says; the file is one page of shared memory that is written in place, so that it can be written
when memory is full too.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from ems.pool.segments.recovery import MOST

STAMPS_AHEAD = 1 << 24
"""So far the bound of stamps is ahead of them when it is moved, which need not happen often."""
CARVINGS_AHEAD = 1 << 16

_MARKS = struct.Struct("<8sQQQ")
_CHECK = struct.Struct("<I")
_RECORD_BYTES = _MARKS.size + _CHECK.size
MAGIC = b"EMSMARK1"


def _unpacked(raw: bytes) -> tuple[int, int, int] | None:
    """Bytes of each segment's file, bounds of stamps and carvings; None where ``raw`` is not what a node wrote."""
    body = raw[: _MARKS.size]
    if len(raw) != _RECORD_BYTES or _CHECK.unpack_from(raw, _MARKS.size)[0] != zlib.crc32(body):
        return None
    magic, segment, stamps, carvings = _MARKS.unpack(body)
    return (segment, stamps, carvings) if magic == MAGIC else None


class NodeStateFile:
    """The file ``path``; one that is not there or cannot be read says nothing: all numbers are possible then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.segment = 0
        """Bytes of each segment's file, 0 where that is not known."""
        self.stamps = self.carvings = MOST
        """MOST where they are not known."""
        with contextlib.suppress(OSError):
            self._open(0)
            known = _unpacked(os.pread(self._file, _RECORD_BYTES, 0))
            if known is not None:
                self.segment, self.stamps, self.carvings = known

    @property
    def limits(self) -> tuple[int, int]:
        """What stamps and carvings that a node gave are below.

        Where that is not known it is half of what they can be, which none reaches: a node that goes on from what a
        client wrote still has as many before it.
        """
        stamps, carvings = (MOST >> 1 if one == MOST else one for one in (self.stamps, self.carvings))
        return stamps, carvings

    def _open(self, flags: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)

    def keep(self, segment: int) -> None:
        """Segments have ``segment`` bytes each.  Raises OSError: the file cannot be made or written."""
        if self._file < 0:
            self._open(os.O_CREAT)
        if segment != self.segment:
            self.segment = segment
            os.pwrite(self._file, self._packed(), 0)

    def cover(self, stamp: int, carving: int) -> None:
        if self.stamps == MOST or stamp > self.stamps:
            self.stamps = stamp + STAMPS_AHEAD
        elif self.carvings != MOST and carving <= self.carvings:
            return
        if self.carvings == MOST or carving > self.carvings:
            self.carvings = carving + CARVINGS_AHEAD
        if self._file >= 0:
            with contextlib.suppress(OSError):  # nothing is lost as long as this node lives
                os.pwrite(self._file, self._packed(), 0)

    def _packed(self) -> bytes:
        body = _MARKS.pack(MAGIC, self.segment, self.stamps, self.carvings)
        return body + _CHECK.pack(zlib.crc32(body))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
