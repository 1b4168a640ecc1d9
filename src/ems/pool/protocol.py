"""The wire between engines and their node: every message, and how messages become bytes.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one message, an array whose first
element is its tag.  A connection begins with :class:`Hello`, answered by :class:`Welcome` or
:class:`Refused`; nothing else is accepted before.  From then on the client asks and the node answers in
order, one answer a request; :class:`Release` alone has none.  :class:`SegmentAttached` carries one file
descriptor beside its bytes.  Many keys travel as one byte string of 16 bytes each, many references as one
of 20 bytes each.

Versions: both sides name the oldest and newest they speak, the newest common one is used.  A later version
may add fields at the end of the greeting and of its answers, which an earlier one ignores.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from ems.errors import (
    EmsError,
    NoSpace,
    PoolRefused,
    ProtocolError,
    StaleReference,
    Unauthorised,
    VersionMismatch,
)
from ems.pool.changes import Run
from ems.pool.keys import KEY_BYTES, Tail

OLDEST_VERSION = 1
NEWEST_VERSION = 1
MAX_KEYS = 65536
"""Most keys of one request: a prompt of a million tokens in blocks of sixteen.  No request takes longer than these."""
MAX_FRAME = 4 << 20
"""Bytes of the largest frame; the answer to a request of :data:`MAX_KEYS` keys fits twice."""
TOKEN_BYTES = 4
MAX_TAIL = 64 << 10
"""Bytes of the tokens of one tail."""
MAX_GREETING = 4096
"""Bytes of the largest frame before the greeting is over."""
GREETING_SECONDS = 5.0
"""How long a client may take to greet."""

TELLS_CHANGES = "changes"
"""Feature of a node that answers :class:`Changes`."""

_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# From the client


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """Greeting: protocol versions spoken, who is speaking, features wished for."""

    oldest: int
    newest: int
    client: str
    pid: int
    features: list[str] = []


class Open(Message, frozen=True):
    """Open (or make) the namespace ``name`` with pages of ``page_size`` bytes; answered by :class:`Opened`.

    A reader that does not know the size says 0: nothing is made then.
    """

    name: str
    page_size: int


class Attach(Message, frozen=True):
    """Ask for a segment to map; answered by :class:`SegmentAttached`."""

    segment: int


class Reserve(Message, frozen=True):
    """Promise slots for consecutive ``keys`` after ``parent``; answered by :class:`Granted`.

    With ``tail`` the last of the keys is that of a block that is not full, to be found by its tokens.
    """

    namespace: int
    parent: bytes
    keys: bytes
    tail: Tail | None = None


class Commit(Message, frozen=True):
    """Publish the pages at ``positions`` of a reservation (all, when None); answered by :class:`Done`."""

    reservation: int
    positions: list[int] | None = None


class Abort(Message, frozen=True):
    """Give back what of a reservation was not committed; answered by :class:`Done`."""

    reservation: int


class Lookup(Message, frozen=True):
    """How many leading ``keys`` are present, with a lease on them if ``lease``; answered by :class:`Hits`.

    With ``tail`` and no keys: the page of that directory that shares most leading tokens.
    """

    namespace: int
    keys: bytes
    lease: bool = False
    tail: Tail | None = None


class Release(Message, frozen=True):
    """A lease is no longer needed; has no answer."""

    lease: int


class Stats(Message, frozen=True):
    """Ask for the node's figures; answered by :class:`Figures`."""


class Changes(Message, frozen=True):
    """What was stored and removed in ``namespaces`` after ``sequence`` (-1: from now on); answered by :class:`Changed`.

    Only for nodes with the feature :data:`TELLS_CHANGES`.
    """

    sequence: int
    namespaces: list[str]


# From the node


class Welcome(Message, frozen=True, forbid_unknown_fields=False):
    """The greeting was accepted: version to speak, the node's identity (new with each start), its segments."""

    version: int
    node: str
    release: str
    autostarted: bool
    segments: int
    features: list[str] = []


class Opened(Message, frozen=True):
    """The namespace's number on this node; -1: there is none of that name yet, so nothing is stored in it."""

    namespace: int


class SegmentAttached(Message, frozen=True):
    """A segment of ``size`` bytes; its file descriptor travels beside this message."""

    segment: int
    size: int


class Granted(Message, frozen=True):
    """One outcome a key (a byte, see :class:`ems.pool.room.Outcome`) and the references of the granted ones."""

    reservation: int
    outcomes: bytes
    refs: bytes


class Hits(Message, frozen=True):
    """``refs`` of the leading present pages, how many keys follow present or being written, the lease."""

    count: int
    pending: int
    lease: int
    refs: bytes
    key: bytes = b""
    """For a tail: the key of the page; ``count`` is then the tokens that it shares."""


class Done(Message, frozen=True):
    """It is done; ``count`` pages were concerned."""

    count: int = 0


class Figures(Message, frozen=True):
    """The node's figures by name."""

    figures: dict[str, Any]


class Changed(Message, frozen=True):
    """Changes in the order in which they happened, and the ``sequence`` from which to go on.

    With ``lost`` more has happened than the node remembers, and nothing is told.
    """

    sequence: int
    lost: bool
    runs: list[Run]


class Refused(Message, frozen=True, forbid_unknown_fields=False):
    """The request was refused: a code of :data:`REFUSALS` and a sentence."""

    code: str
    reason: str


Request = Hello | Open | Attach | Reserve | Commit | Abort | Lookup | Release | Stats | Changes
Answer = Welcome | Opened | SegmentAttached | Granted | Hits | Done | Figures | Changed | Refused

REFUSALS: dict[str, type[EmsError]] = {
    "protocol": ProtocolError,
    "version": VersionMismatch,
    "unauthorised": Unauthorised,
    "no-space": NoSpace,
    "stale": StaleReference,
    "refused": PoolRefused,
}
"""Code on the wire and the error that it stands for, most special first."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Message) -> bytes:
    """The frame that carries ``message``."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def encode_request(message: Request) -> bytes:
    """The frame that carries the client's ``message``.

    Raises:
        ProtocolError: it is larger than a node accepts.
    """
    _check_request(message)
    return encode(message)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    """The client's message in a frame's ``body``.

    Raises:
        ProtocolError: it is not a request of the protocol, or its keys are cut or too many.
    """
    try:
        message = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a request of the EMS protocol: {error}") from error
    _check_request(message)
    return message


def _check_request(message: Request) -> None:
    if isinstance(message, Lookup | Reserve):
        if len(message.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(message.keys)} bytes of keys, expected a multiple of {KEY_BYTES}")
        _check_count(len(message.keys) // KEY_BYTES, "keys")
        _check_tail(message.tail)
    if isinstance(message, Reserve) and len(message.parent) != KEY_BYTES:
        raise ProtocolError(f"a parent key of {len(message.parent)} bytes, expected {KEY_BYTES}")
    if isinstance(message, Commit):
        _check_count(len(message.positions or ()), "positions")
    if isinstance(message, Changes):
        _check_count(len(message.namespaces), "namespaces")


def _check_tail(tail: Tail | None) -> None:
    if tail is None:
        return
    if len(tail.directory) != KEY_BYTES or len(tail.tokens) % TOKEN_BYTES:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected {TOKEN_BYTES} a token in a named directory")
    if not 0 < len(tail.tokens) <= MAX_TAIL:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected at most {MAX_TAIL} and at least one token")


def _check_count(count: int, what: str) -> None:
    if count > MAX_KEYS:
        raise ProtocolError(f"{count} {what} in one request, expected at most {MAX_KEYS}")


def decode_answer(body: bytes | bytearray | memoryview) -> Answer:
    """The node's message in a frame's ``body``.

    Raises:
        ProtocolError: it is not an answer of the protocol.
    """
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer of the EMS protocol: {error}") from error


def refusal(error: EmsError) -> Refused:
    """The message that carries ``error`` to the client."""
    for code, kind in REFUSALS.items():
        if isinstance(error, kind):
            return Refused(code, str(error))
    return Refused("refused", str(error))


def raise_refusal(message: Refused) -> None:
    """Raise the error that ``message`` carries."""
    raise REFUSALS.get(message.code, PoolRefused)(message.reason)


def negotiate(oldest: int, newest: int) -> int:
    """The newest protocol version that a client speaking ``oldest`` to ``newest`` shares with this side.

    Raises:
        VersionMismatch: there is none.
    """
    version = min(newest, NEWEST_VERSION)
    if version < max(oldest, OLDEST_VERSION):
        raise VersionMismatch(
            f"the client speaks protocol versions {oldest} to {newest}, this node {OLDEST_VERSION} to "
            f"{NEWEST_VERSION}; install the same release of EMS on both sides"
        )
    return version


class FrameReader:
    """Cuts a byte stream into frame bodies; refuses frames above ``limit`` bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they came from the stream."""
        self._buffer += data

    def frames(self) -> Iterator[bytes]:
        """Bodies of the frames that are complete by now.

        Raises:
            ProtocolError: a frame announces more than ``limit`` bytes.
        """
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes, expected at most {self.limit}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
