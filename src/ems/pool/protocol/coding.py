"""Messages and bytes: msgpack arrays, taken by the letter, each in a frame; errors travel as a code and a sentence."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import msgspec

from ems import errors
from ems.errors import EmsError, PoolRefused, ProtocolError
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES
from ems.pool.protocol import messages
from ems.pool.protocol.limits import CHECKSUM_BYTES, TOKEN_BYTES
from ems.pool.protocol.messages import Answer, Message, Refused, Request

MAX_FRAME = 4 << 20
"""Bytes of the largest frame; the answer to a request of :data:`MAX_KEYS` keys fits twice."""
MAX_GREETING = 4096
"""Bytes of the largest frame before the greeting is over."""

OLDEST_VERSION = 1
NEWEST_VERSION = 3
"""Versions of the protocol that are spoken here."""
_FIELDS: dict[int, dict[type, int]] = {
    1: {messages.Commit: 3, messages.Lookup: 6, messages.Prefetch: 2, messages.Explain: 2, messages.Announce: 2},
    2: {messages.Lookup: 7},
}
"""How many fields requests have in older versions.

Version 1 lacks the words ``local_only`` and ``cluster_write``, both lack ``patience`` and ``directories``.
"""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_NAMES_KEYS = (messages.Lookup, messages.Reserve, messages.Explain, messages.Prefetch, messages.Announce)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

REFUSALS: dict[str, type[EmsError]] = {
    "protocol": ProtocolError,
    "version": errors.VersionMismatch,
    "unauthorised": errors.Unauthorised,
    "quota": errors.QuotaExceeded,
    "no-space": errors.NoSpace,
    "stale": errors.StaleReference,
    "restarting": errors.PoolRestarting,
    "refused": PoolRefused,
}
"""Code on the wire and the error that it stands for, most special first."""


def negotiate(oldest: int, newest: int) -> int:
    """The newest protocol version that a client speaking ``oldest`` to ``newest`` shares with this side."""
    version = min(newest, NEWEST_VERSION)
    if version < max(oldest, OLDEST_VERSION):
        raise errors.VersionMismatch(
            f"the client speaks protocol versions {oldest} to {newest}, this node {OLDEST_VERSION} to "
            f"{NEWEST_VERSION}; install the same release of EMS on both sides"
        )
    return version


def body(message: Message) -> bytes:
    """What a frame has after its length."""
    return _encoder.encode(message)


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def encode(message: Message) -> bytes:
    return frame(body(message))


def encode_request(message: Request, version: int = NEWEST_VERSION) -> bytes:
    """A request's frame, looked at as its reader will: a mistake costs its caller no connection.

    What ``version`` of the protocol has no words for is not said.
    """
    raw = body(message)
    decode_request(raw)
    if (count := _FIELDS.get(version, {}).get(type(message))) is not None:
        fields = msgspec.structs.astuple(message)[:count]
        raw = _encoder.encode((type(message).__name__, *fields))
    return frame(raw)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    try:
        message = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request of the EMS protocol: {error}") from error
    _refuse_what_does_not_add_up(message)
    return message


def _refuse_what_does_not_add_up(message: Request) -> None:
    """See that a request keeps to more than the types and bounds of its fields."""
    if isinstance(message, _NAMES_KEYS) and len(message.keys) % KEY_BYTES:
        raise ProtocolError(f"{len(message.keys)} bytes of keys, expected a multiple of {KEY_BYTES}")
    if isinstance(message, messages.Lookup):
        _refuse_strange_lookup(message)
    elif isinstance(message, messages.Reserve):
        _refuse_strange_tails(message.tails or {}, len(message.keys) // KEY_BYTES)
    elif isinstance(message, messages.StillWriting) and len(message.refs) % REF_BYTES:
        raise ProtocolError(f"{len(message.refs)} bytes of references, expected a multiple of {REF_BYTES}")
    elif isinstance(message, messages.Commit) and message.checksums:
        count = len(message.positions or ())
        if len(message.checksums) != CHECKSUM_BYTES * count:
            raise ProtocolError(
                f"{len(message.checksums)} bytes of checksums for {count} positions, expected {CHECKSUM_BYTES} each"
            )
    elif isinstance(message, messages.Corrupt):
        count = len(message.keys) // KEY_BYTES
        if not count or len(message.keys) % KEY_BYTES or len(message.refs) != count * REF_BYTES:
            raise ProtocolError(
                f"{len(message.keys)} bytes of keys and {len(message.refs)} of references to corrupt pages, expected "
                f"at least one page with {KEY_BYTES} and {REF_BYTES} bytes each"
            )


def _refuse_strange_lookup(message: messages.Lookup) -> None:
    if message.tail is not None:
        _refuse_strange(message.tail)
    size, keys = len(message.directories), len(message.keys) // KEY_BYTES
    chunks = size // KEY_BYTES - 1
    if size and (size % KEY_BYTES or chunks < 1 or keys % chunks):
        raise ProtocolError(
            f"{size} bytes of directories for {keys} keys, expected {KEY_BYTES} for each chunk, of as many keys as the "
            f"others, and {KEY_BYTES} more"
        )


def _refuse_strange_tails(tails: Mapping[int, Tail], keys: int) -> None:
    for position, tail in tails.items():
        if not 0 <= position < keys:
            raise ProtocolError(f"a tail of key {position}, expected 0 to {keys - 1}")
        _refuse_strange(tail)


def _refuse_strange(tail: Tail) -> None:
    if len(tail.directory) != KEY_BYTES or not tail.tokens or len(tail.tokens) % TOKEN_BYTES:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected {TOKEN_BYTES} a token in a named directory")


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
