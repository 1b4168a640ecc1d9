"""Bytes and the stream: each message in a frame, a 4-byte big-endian length and that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ems.errors import ProtocolError

MAX_FRAME = 4 << 20
"""Bytes of the largest frame; the answer to a request of :data:`MAX_KEYS` keys fits twice."""
MAX_GREETING = 4096
"""Bytes of the largest frame before the greeting is over."""

_LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies; refuses frames above ``limit`` bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def pending(self) -> bytes:
        return bytes(self._buffer)

    @property
    def size(self) -> int:
        return len(self._buffer)

    @property
    def more(self) -> bool:
        """Whether another whole frame is there, or one that is too large."""
        if len(self._buffer) < _LENGTH.size:
            return False
        length = int(_LENGTH.unpack_from(self._buffer)[0])
        return len(self._buffer) >= _LENGTH.size + length or length > self.limit

    def next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes, expected at most {self.limit}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def frames(self) -> Iterator[bytes]:
        while (body := self.next()) is not None:
            yield body
