"""What a node says to the agents that have Mooncake's client, and how it travels: msgpack in frames over a socketpair.

A frame is a length and a body; with the frame that attaches a segment comes the descriptor of its file.  Nothing that
is received is ever run.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import TypeVar

import msgspec

from ems.errors import ProtocolError
from ems.pool.keys import Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct(">I")


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What an agent is asked to do."""


class Start(Call, frozen=True, tag=True):
    """Become a client of the cluster: one that ``gives`` it memory, or one that moves pages.

    ``secrets`` seal pages, by tenant or the only one under an empty name; pages are stored ``replicas`` times, with
    ``own_place`` in this host's memory first, which the cluster calls ``own``.  Hosts are ``silent`` until then.
    """

    config: MooncakeConfig
    gives: bool
    secrets: dict[str, bytes] = {}
    own_place: bool = True
    own: str = ""
    replicas: int = 1
    silent: dict[str, float] = {}


class Attach(Call, frozen=True, tag=True):
    """The file that comes with this is that of ``segment``, of ``size`` bytes; ``mapped``: nobody would cut it."""

    segment: int
    size: int
    mapped: bool


class Detach(Call, frozen=True, tag=True):
    """Let go of ``segment``, which nobody needs any more."""

    segment: int


class Exist(Call, frozen=True, tag=True):
    """Say of each key whether the cluster has it, 1 or 0, and then of each directory whether it lists tails there."""

    namespace: str
    keys: list[bytes]
    directories: list[bytes] = []


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a page lies that is to be stored or fetched; ``checksum`` is what its bytes must have, if that is known."""

    key: bytes
    segment: int
    offset: int
    parent: bytes = b""
    checksum: int | None = None


class Fetch(Call, frozen=True, tag=True):
    """Fill the places of ``pages``, of ``size`` bytes each."""

    namespace: str
    size: int
    pages: list[Place]


class Store(Call, frozen=True, tag=True):
    """Store what lies in the places of ``pages``, of ``size`` bytes each."""

    namespace: str
    size: int
    pages: list[Place]


class Cancel(Call, frozen=True, tag=True):
    """Nobody waits for what the call before does, and where it reads may be something else from now on."""


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A tail that the cluster lists, and the key of the block before it."""

    tail: Tail
    parent: bytes


class FindTails(Call, frozen=True, tag=True):
    """Say which tails the cluster lists."""

    namespace: str
    directories: list[bytes]


class ListTails(Call, frozen=True, tag=True):
    """Add to the lists of tails."""

    namespace: str
    tails: list[Listed]


class HotList(msgspec.Struct, frozen=True, array_like=True):
    """Runs of ``namespace`` that are hot."""

    namespace: str
    runs: list[HotRun]


class ShareHot(Call, frozen=True, tag=True):
    """Add to the lists of hot pages, and say what is on them."""

    lists: list[HotList]


class Clear(Call, frozen=True, tag=True):
    """Remove all of ``namespace``, whoever stored it."""

    namespace: str


class Probe(Call, frozen=True, tag=True):
    """Write something, read it back, remove it."""


class Mark(Call, frozen=True, tag=True):
    """Say whether ``name``, which lies in what this host lends, is there (1 or 0), and put it there if not."""

    name: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of a call: a number for each key, :class:`~ems.pool.tiers.answers.Outcome` where pages move.

    ``unsafe`` says that something may still write into the memory of this call; ``error`` is why all of it failed;
    ``direct`` of the pages that were fetched came without a call of Mooncake's own; hosts are ``silent`` until then.
    """

    codes: list[int] = []
    sums: list[int] = []
    tails: list[Listed] = []
    hot: list[HotList] = []
    text: str = ""
    unsafe: bool = False
    error: str = ""
    direct: int = 0
    silent: dict[str, float] = {}


Calls = (
    Start | Attach | Detach | Exist | Fetch | Store | Cancel | FindTails | ListTails | ShareHot | Clear | Probe | Mark
)
_encoder = msgspec.msgpack.Encoder()
calls: msgspec.msgpack.Decoder[Calls] = msgspec.msgpack.Decoder(Calls)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_T = TypeVar("_T")


def send(sock: socket.socket, message: Call | Answer, descriptor: int | None = None) -> None:
    """Raises OSError: the other side is gone, or does not listen in time."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes, expected at most {MAX_FRAME}")
    head = _LENGTH.pack(len(body))
    if descriptor is not None:
        socket.send_fds(sock, [head], [descriptor])
        sock.sendall(body)
    else:
        sock.sendall(head + body)


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[_T]) -> tuple[_T, list[int]]:
    """The next message and the descriptors that came with it, which are the caller's to close.

    Raises EOFError: the other side is gone.  OSError: nothing comes in time.  ProtocolError: it makes no sense.
    """
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    try:
        head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
        if not head:
            raise EOFError
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME:
            raise ProtocolError(f"a message of {length} bytes, expected at most {MAX_FRAME}")
        return decoder.decode(_exactly(sock, length)), list(descriptors)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message that makes no sense: {error}") from error


def readable(sock: socket.socket, seconds: float | None) -> bool:
    """Whether something comes on ``sock``, or its end, within ``seconds``; None waits for it.

    Its descriptor may have any number, which ``select`` does not take.  Raises ValueError: it is closed.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(found)
