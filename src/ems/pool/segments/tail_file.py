"""The tokens of blocks that are not full, kept beside the segments, because they do not fit into a slot header.

A file to which a record is added with each such page, in shared memory like the segments.  What always holds: a record
that was cut or damaged ends what is read, and costs nothing but that; the file is written anew when most of it is of no
use any more, a bounded part with each page that is added; it has a bound in bytes, and so has the new one beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES

MAGIC = b"EMSTAIL3"
_RECORD = struct.Struct("<III")
LEAST_BYTES = 4 << 20
"""The file may always grow so large before it is written anew."""
STEP_BYTES = 256 << 10
"""Bytes of the file that are looked at in one go when it is written anew; a record has less."""
STEP_RECORDS = 64
"""Records that are looked at in one go."""

Listed = tuple[str, bytes, bytes, Tail]
"""Namespace, key of the page, where it lies (packed), directory and tokens."""


def pack_record(namespace: str, key: bytes, ref: bytes, tail: Tail) -> bytes:
    name = namespace.encode()
    body = b"".join((name, key, ref, tail.directory, tail.tokens))
    return _RECORD.pack(len(body), zlib.crc32(body), len(name)) + body


def unpack_records(raw: bytes, at: int = 0, most: int | None = None) -> tuple[list[Listed], int]:
    """The leading records of ``raw`` from ``at`` on that are whole, at most ``most`` of them, and where they end."""
    found: list[Listed] = []
    while at + _RECORD.size <= len(raw) and (most is None or len(found) < most):
        length, check, name = _RECORD.unpack_from(raw, at)
        body = raw[at + _RECORD.size : at + _RECORD.size + length]
        if len(body) < length or name + 2 * KEY_BYTES + REF_BYTES > length or zlib.crc32(body) != check:
            break
        key, ref = name + KEY_BYTES, name + KEY_BYTES + REF_BYTES
        tail = Tail(body[ref : ref + KEY_BYTES], body[ref + KEY_BYTES :])
        found.append((body[:name].decode(errors="replace"), body[name:key], body[key:ref], tail))
        at += _RECORD.size + length
    return found, at


class TailFile:
    """The file at ``path``, made when there is something to be stored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new_path = path.with_name(path.name + ".new")
        self._file = -1
        self._size = 0
        self._compact_above = LEAST_BYTES
        self._useful = 0
        """Bytes that were of use when it was last written anew."""
        self._new = -1
        """The file that will take the place of this one, as far as it is written."""
        self._new_size = 0
        self._copied = 0
        """How far this one was looked through for the new one."""

    def read(self) -> list[Listed]:
        """What was stored, also of pages that left since.  Raises OSError: it cannot be read."""
        self._new_path.unlink(missing_ok=True)
        if not self._path.is_file():
            return []
        self._open(0)
        raw = os.pread(self._file, self._size, 0)
        records, end = unpack_records(raw, len(MAGIC)) if raw.startswith(MAGIC) else ([], 0)
        # What is added from now on must not lie behind a record that cannot be read.
        self._size = end
        os.ftruncate(self._file, self._size)
        return records

    def _open(self, flags: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def add(self, namespace: str, key: bytes, ref: bytes, tail: Tail, most: int) -> None:
        """Store one more in a file of at most ``most`` bytes.  Raises OSError: memory, or the file, is full."""
        if self._file < 0:
            self._open(os.O_CREAT)
        record = (b"" if self._size else MAGIC) + pack_record(namespace, key, ref, tail)
        if self._size + len(record) > most or self._write(self._file, record) < len(record):
            os.ftruncate(self._file, self._size)
            self._compact_above = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(record)

    def compact(self, still_found: Callable[[str, bytes, bytes], bool], most: int) -> None:
        """If the file is long, copy a few of its records into a new one, which takes its place when it has all.

        ``still_found`` tells of a namespace, key and place if the page there is found by its tokens; ``most`` is as
        for :meth:`add`.  Raises OSError: memory is full; all remains as it is then.
        """
        # Where more than half of the room is of use, half of what is left of it has to be written before the next time.
        if self._new < 0 and self._size <= min(self._compact_above, (most + self._useful) // 2):
            return
        try:
            self._copy_some(still_found)
        except OSError:
            self._drop_new()
            raise

    def _copy_some(self, still_found: Callable[[str, bytes, bytes], bool]) -> None:
        kept = b""
        if self._new < 0:
            self._new_path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._new = os.open(self._new_path, flags, 0o600)
            self._new_size, self._copied, kept = 0, len(MAGIC), MAGIC
        records, end = unpack_records(os.pread(self._file, STEP_BYTES, self._copied), most=STEP_RECORDS)
        kept += b"".join(pack_record(*one) for one in records if still_found(*one[:3]))
        written = 0
        while written < len(kept):
            written += self._write(self._new, memoryview(kept)[written:])
        self._new_size += len(kept)
        self._copied += end
        if records and self._copied < self._size:
            return
        self._rename(self._new_path)
        os.close(self._file)
        self._file, self._size, self._new = self._new, self._new_size, -1
        self._useful = self._size
        self._compact_above = max(2 * self._size, LEAST_BYTES)

    def _drop_new(self) -> None:
        if self._new >= 0:
            os.close(self._new)
            self._new = -1
            with contextlib.suppress(OSError):
                self._new_path.unlink()

    def _write(self, file: int, data: bytes | memoryview) -> int:
        return os.write(file, data)

    def _rename(self, new: Path) -> None:
        new.rename(self._path)

    def close(self) -> None:
        """Let go of the file, which stays."""
        for file in (self._file, self._new):
            if file >= 0:
                os.close(file)
        self._file = self._new = -1
