"""Small files of the node beside its segments, each written whole.

What always holds: a file is the one before or the new one, because it is replaced by renaming; one that is damaged, or
that somebody else wrote, is never taken for the node's own.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

MAGIC = b"EMSSIDE1"
_HEAD = struct.Struct("<8sI")


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
    """Replace what is at ``path``.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    replace_file(path, [_HEAD.pack(MAGIC, zlib.crc32(body)), body])


def replace_file(path: Path, parts: list[bytes]) -> None:
    """Put a file of ``parts`` in the place of what is at ``path``, by way of a neighbour of that name and ``.new``.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
