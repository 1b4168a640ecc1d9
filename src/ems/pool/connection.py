"""One client of a node: its socket, its greeting, what it sent in part, what it has not yet taken.

What always holds: nothing is answered before the greeting; answers go out in the order of their requests;
whatever the client sends or leaves unread costs this connection only, and it is told why if it still listens.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Protocol

import structlog

from ems.config import format_size
from ems.errors import EmsError, ProtocolError
from ems.pool import protocol

if TYPE_CHECKING:
    import asyncio

MAX_UNSENT = 8 << 20
"""Bytes of answers that may wait for a client that does not read; above, its connection ends."""
READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""
_UCRED = struct.Struct("3i")

_log = structlog.get_logger("ems.node")


class Host(Protocol):
    """What a connection needs of its node."""

    loop: asyncio.AbstractEventLoop

    def welcome(self, version: int) -> protocol.Welcome:
        """The answer to a good greeting."""

    def answer(self, owner: int, request: protocol.Request) -> protocol.Answer | None:
        """Do what a greeted client asks; None for requests that have no answer."""

    def descriptor(self, segment: int) -> int:
        """The open file of a segment."""

    def answered(self) -> None:
        """All that came in together has been answered."""

    def forget(self, owner: int, reason: str | None) -> None:
        """The connection of ``owner`` ended."""


class Connection:
    """One client: its socket, what it has sent, what it has not yet taken."""

    def __init__(self, node: Host, sock: socket.socket, owner: int, now: float) -> None:
        self._node = node
        self._sock = sock
        self._owner = owner
        self._greet_before = now + protocol.GREETING_SECONDS
        self._reader = protocol.FrameReader(protocol.MAX_GREETING)
        self._greeted = False
        self._unsent = bytearray()
        self.pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self.client = "unknown"

    @property
    def greeted(self) -> bool:
        """Whether the client has said hello."""
        return self._greeted

    def on_readable(self) -> None:
        """Bytes or the end of the connection are there."""
        try:
            data = self._sock.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self.close(None)
            return
        self._reader.feed(data)
        try:
            for body in self._reader.frames():
                self._handle(protocol.decode_request(body))
                if self._sock.fileno() < 0:
                    return
        except ProtocolError as error:
            self._refuse(error)
        except Exception:  # noqa: BLE001
            # Root of all that a client can set off: a defect here costs the one who found it, not the others.
            _log.exception("a request brought up a defect", client=self.client, pid=self.pid)
            self._refuse(ProtocolError("the node has a defect that this request brought up, see its log"))
        self._node.answered()

    def _handle(self, request: protocol.Request) -> None:
        if isinstance(request, protocol.Hello):
            self._greet(request)
            return
        if not self._greeted:
            raise ProtocolError(f"{type(request).__name__} came before the greeting, say Hello first")
        try:
            answer = self._node.answer(self._owner, request)
        except ProtocolError:
            raise
        except EmsError as error:
            answer = protocol.refusal(error)
        if answer is None:
            return
        if isinstance(answer, protocol.SegmentAttached):
            self._send_descriptor(answer)
        else:
            self.send(protocol.encode(answer))

    def _greet(self, hello: protocol.Hello) -> None:
        if self._greeted:
            raise ProtocolError("a second Hello on one connection")
        try:
            version = protocol.negotiate(hello.oldest, hello.newest)
        except EmsError as error:
            self._refuse(error)
            return
        self._greeted = True
        self.client = hello.client
        self._reader.limit = protocol.MAX_FRAME
        self.send(protocol.encode(self._node.welcome(version)))

    def check_greeting(self, now: float) -> None:
        """End the connection if its client should have greeted by ``now``."""
        if not self._greeted and now >= self._greet_before:
            self._refuse(ProtocolError(f"the client did not greet within {protocol.GREETING_SECONDS:.0f} s"))

    def _refuse(self, error: EmsError) -> None:
        self.send(protocol.encode(protocol.refusal(error)))
        self.close(str(error))

    def send(self, data: bytes) -> None:
        """Send ``data``, keeping what the socket does not take now."""
        if self._sock.fileno() < 0:
            return
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._lost(error)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._node.loop.add_writer(self._sock, self._on_writable)
        self._unsent += data
        if len(self._unsent) > MAX_UNSENT:
            self.close(f"it left {format_size(len(self._unsent))} of answers unread")

    def _on_writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._node.loop.remove_writer(self._sock)

    def _send_descriptor(self, answer: protocol.SegmentAttached) -> None:
        data = protocol.encode(answer)
        if self._unsent:
            self._refuse(ProtocolError("a segment was asked for while earlier answers wait to be read"))
            return
        try:
            sent = socket.send_fds(self._sock, [data], [self._node.descriptor(answer.segment)])
        except OSError as error:
            self._lost(error)
            return
        if sent != len(data):
            self.send(data[sent:])

    def _lost(self, error: OSError) -> None:
        """The connection broke; a client that left with answers unread broke it on purpose."""
        self.close(None if isinstance(error, ConnectionError) else error.strerror or str(error))

    def close(self, reason: str | None) -> None:
        """End the connection; ``reason`` is None when the client left by itself."""
        if self._sock.fileno() < 0:
            return
        self._node.loop.remove_reader(self._sock)
        self._node.loop.remove_writer(self._sock)
        self._sock.close()
        self._node.forget(self._owner, reason)
