"""What an administrator has pinned, in a file beside the segments, so that it stays pinned when the node starts again.

What always holds: the file is written whole after each administrative act that changed it; one that cannot be read
knows of no pin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ems.pool.segments.side_file import read_side_file, write_side_file

Pins = dict[str, dict[bytes, float]]
"""Until when, by namespace and key; times are those of the host's clock that never goes back."""


class PinFile:
    """The file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: bytes | None = None

    def read(self) -> Pins:
        """What was pinned."""
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(read_side_file(self._path) or b"\x80", type=Pins)
        return {}

    def replace(self, pins: Mapping[str, Mapping[bytes, float]]) -> None:
        """Exactly ``pins`` count.

        Raises:
            OSError: the file cannot be written.
        """
        body = msgspec.msgpack.encode(pins)
        if body != self._written and (pins or self._path.exists()):
            write_side_file(self._path, body)
        self._written = body
