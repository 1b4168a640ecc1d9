"""Small files of the node beside its segments, which outlive it as these do.

What always holds: a :class:`SideFile` is the one before or the new one, because it is replaced by renaming; one that is
damaged, or that somebody else wrote, is never taken for the node's own.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from ems.pool.files import replace_file
from ems.pool.segments.recovery import MOST

MAGIC = b"EMSSIDE1"
_HEAD = struct.Struct("<8sI")

STAMPS_AHEAD = 1 << 24
"""So far the bound of stamps is ahead of them when it is moved, which need not happen often."""
CARVINGS_AHEAD = 1 << 16

_RECORD = struct.Struct("<8sQQQ")
_CHECK = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CHECK.size
NODE_STATE_MAGIC = b"EMSMARK1"

Value = TypeVar("Value")
Pins = dict[str, dict[bytes, float]]
"""Until when pages are pinned, by namespace and key; times are those of the host's clock that never goes back."""


class SideFile(Generic[Value]):
    """A value of the type ``kind`` in the file ``path``; ``value`` is an empty one where the file cannot be read."""

    def __init__(self, path: Path, kind: type[Value]) -> None:
        self._path = path
        self.value = kind()
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            raw = path.read_bytes()
            if raw[: _HEAD.size] == _head(raw[_HEAD.size :]):
                self.value = msgspec.msgpack.decode(raw[_HEAD.size :], type=kind)
        self._written = msgspec.msgpack.encode(self.value)

    def replace(self, value: Value) -> None:
        """Write ``value`` where it is another, by way of a neighbour with ``.new`` behind its name.

        Raises OSError: it cannot be written; what was there stays.
        """
        body = msgspec.msgpack.encode(value)
        if body != self._written:
            new = self._path.with_name(f"{self._path.name}.new")
            new.unlink(missing_ok=True)
            replace_file(self._path, new, [_head(body), body])
        self.value, self._written = value, body


def _head(body: bytes) -> bytes:
    return _HEAD.pack(MAGIC, zlib.crc32(body))


class NodeStateFile:
    """What a node knows of its segments that nobody who maps them can change: the file ``path``, its marks.

    The size of their files, and how far the numbers that grow (stamps of pages, carvings of segments) have come at
    most.  A client can write any number into its own segments: without a bound the next node would go on from there,
    and the one after it would take the pages of everybody for damaged.  What always holds: no stamp and no carving is
    given that is not below what the file says; the file is one page of shared memory that is written in place, so that
    it can be written when memory is full too.  One that is not there or cannot be read says nothing: all numbers are
    possible then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.segment = 0
        """Bytes of each segment's file, 0 where that is not known."""
        self.stamps = self.carvings = 0
        """0 where they are not known."""
        with contextlib.suppress(OSError):
            self._open(0)
            raw = os.pread(self._file, _RECORD_BYTES, 0)
            if len(raw) == _RECORD_BYTES and raw[_RECORD.size :] == _CHECK.pack(zlib.crc32(raw[: _RECORD.size])):
                magic, *known = _RECORD.unpack_from(raw)
                if magic == NODE_STATE_MAGIC:
                    self.segment, self.stamps, self.carvings = known

    @property
    def limits(self) -> tuple[int, int]:
        """What stamps and carvings that a node gave are below.

        Where that is not known it is half of what they can be, which none reaches: a node that goes on from what a
        client wrote still has as many before it.
        """
        return self.stamps or MOST >> 1, self.carvings or MOST >> 1

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
        if stamp <= self.stamps and carving <= self.carvings:
            return
        if stamp > self.stamps:
            self.stamps = stamp + STAMPS_AHEAD
        if carving > self.carvings:
            self.carvings = carving + CARVINGS_AHEAD
        if self._file >= 0:
            with contextlib.suppress(OSError):  # nothing is lost as long as this node lives
                os.pwrite(self._file, self._packed(), 0)

    def _packed(self) -> bytes:
        body = _RECORD.pack(NODE_STATE_MAGIC, self.segment, self.stamps, self.carvings)
        return body + _CHECK.pack(zlib.crc32(body))

    def forget(self) -> None:
        """The segments of which it told are gone, and the file with them."""
        self.close()
        self.segment = self.stamps = self.carvings = 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
