"""Small files of the node beside its segments, each written whole.

What always holds: a file is the one before or the new one, because it is replaced by renaming; one that is damaged, or
that somebody else wrote, is never taken for the node's own.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ems.pool.files import replace_file

MAGIC = b"EMSSIDE1"
_HEAD = struct.Struct("<8sI")

Value = TypeVar("Value")
Pins = dict[str, dict[bytes, float]]
"""Until when pages are pinned, by namespace and key; times are those of the host's clock that never goes back."""


def read_side_file(path: Path) -> bytes | None:
    """What was written to ``path``; None where nothing was, or it is not whole."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) < _HEAD.size or _HEAD.unpack_from(raw) != (MAGIC, zlib.crc32(raw[_HEAD.size :])):
        return None
    return raw[_HEAD.size :]


def write_side_file(path: Path, body: bytes) -> None:
    """Replace what is at ``path``, by way of a neighbour of that name and ``.new``.

    Raises OSError: it cannot be written; what was there stays.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    replace_file(path, new, [_HEAD.pack(MAGIC, zlib.crc32(body)), body])


class SideFile(Generic[Value]):
    """A value of the type ``kind`` in the file ``path``; ``value`` is an empty one where the file cannot be read.

    ``code`` is the module of msgspec that encodes it.
    """

    def __init__(self, path: Path, kind: type[Value], code: Any = msgspec.msgpack) -> None:
        self._path = path
        self._code = code
        self.value = kind()
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            self.value = code.decode(read_side_file(path) or code.encode(self.value), type=kind)
        self._written: bytes = code.encode(self.value)

    def replace(self, value: Value) -> None:
        """Write ``value`` where it is another.  Raises OSError: it cannot be written; what was there stays."""
        body = self._code.encode(value)
        if body != self._written:
            write_side_file(self._path, body)
        self.value, self._written = value, body
