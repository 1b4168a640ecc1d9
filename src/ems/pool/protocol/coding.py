"""Messages and bytes: msgpack arrays, taken by the letter, each in a frame; errors travel as a code and a sentence."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from ems.errors import (
    EmsError,
    NoSpace,
    PoolRefused,
    PoolRestarting,
    ProtocolError,
    QuotaExceeded,
    StaleReference,
    Unauthorised,
    VersionMismatch,
)
from ems.pool.protocol.checks import check_request
from ems.pool.protocol.messages import Answer, Message, Refused, Request

MAX_FRAME = 4 << 20
"""Bytes of the largest frame; the answer to a request of :data:`MAX_KEYS` keys fits twice."""
MAX_GREETING = 4096
"""Bytes of the largest frame before the greeting is over."""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

REFUSALS: dict[str, type[EmsError]] = {
    "protocol": ProtocolError,
    "version": VersionMismatch,
    "unauthorised": Unauthorised,
    "quota": QuotaExceeded,
    "no-space": NoSpace,
    "stale": StaleReference,
    "restarting": PoolRestarting,
    "refused": PoolRefused,
}
"""Code on the wire and the error that it stands for, most special first."""


def body(message: Message) -> bytes:
    """What a frame has after its length."""
    return _encoder.encode(message)


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def encode(message: Message) -> bytes:
    return frame(body(message))


def encode_request(message: Request) -> bytes:
    """A request's frame, looked at as its reader will: a mistake costs its caller no connection."""
    raw = body(message)
    decode_request(raw)
    return frame(raw)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    try:
        message = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request of the EMS protocol: {error}") from error
    check_request(message)
    return message


def decode_answer(body: bytes | bytearray | memoryview) -> Answer:
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer of the EMS protocol: {error}") from error


def refusal(error: EmsError) -> Refused:
    for code, kind in REFUSALS.items():
        if isinstance(error, kind):
            return Refused(code, str(error))
    return Refused("refused", str(error))


def raise_refusal(message: Refused) -> None:
    raise REFUSALS.get(message.code, PoolRefused)(message.reason)


class FrameReader:
    """Cuts a byte stream into frame bodies; refuses frames above ``limit`` bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

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
