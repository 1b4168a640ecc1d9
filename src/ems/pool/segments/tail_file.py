"""The tokens of blocks that are not full, kept beside the segments, because they do not fit into a slot header.

A file to which a record is added with each such page, in shared memory like the segments.  What always holds: a record
that was cut or damaged ends what is read, and costs nothing but that; the file is written anew when most of it is of no
use any more, so its size follows that of what is stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES

_MAGIC = b"EMSTAIL2"
_RECORD = struct.Struct("<III")
_LEAST_BYTES = 4 << 20
"""The file may always grow so large before it is written anew."""

Listed = tuple[str, bytes, bytes, Tail]
"""Namespace, key of the page, where it lies (packed), directory and tokens."""


def pack_record(namespace: str, key: bytes, ref: bytes, tail: Tail) -> bytes:
    """The record of one page."""
    name = namespace.encode()
    body = b"".join((name, key, ref, tail.directory, tail.tokens))
    return _RECORD.pack(len(body), zlib.crc32(body), len(name)) + body


def unpack_records(raw: bytes, at: int = 0) -> tuple[list[Listed], int]:
    """The leading records of ``raw`` from ``at`` on that are whole, and where they end."""
    found: list[Listed] = []
    while at + _RECORD.size <= len(raw):
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
        self._file = -1
        self._size = 0
        self._compact_above = _LEAST_BYTES

    def read(self) -> list[Listed]:
        """What was stored, also of pages that left since.

        Raises:
            OSError: it cannot be read.
        """
        if not self._path.is_file():
            return []
        self._open(0)
        raw = os.pread(self._file, self._size, 0)
        records, end = unpack_records(raw, len(_MAGIC)) if raw.startswith(_MAGIC) else ([], 0)
        # What is added from now on must not lie behind a record that cannot be read.
        self._size = end
        os.ftruncate(self._file, self._size)
        return records

    def _open(self, flags: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        self._size = os.fstat(self._file).st_size

    def add(self, namespace: str, key: bytes, ref: bytes, tail: Tail) -> bool:
        """Store one more; whether it is time for :meth:`rewrite`.

        Raises:
            OSError: memory is full.
        """
        if self._file < 0:
            self._open(os.O_CREAT)
        record = (b"" if self._size else _MAGIC) + pack_record(namespace, key, ref, tail)
        if self._write(self._file, record) < len(record):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(record)
        return self._size > self._compact_above

    def rewrite(self, tails: Iterable[Listed]) -> None:
        """Keep ``tails`` and nothing else.

        Raises:
            OSError: memory is full; all remains as it is then.
        """
        raw = b"".join([_MAGIC, *(pack_record(*listed) for listed in tails)])
        new = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(new, flags, 0o600)
        try:
            written = 0
            while written < len(raw):
                written += self._write(file, memoryview(raw)[written:])
            self._rename(new)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        self.close()
        self._file, self._size = file, len(raw)
        self._compact_above = max(2 * len(raw), _LEAST_BYTES)

    def _write(self, file: int, data: bytes | memoryview) -> int:
        return os.write(file, data)

    def _rename(self, new: Path) -> None:
        new.rename(self._path)

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
