"""One client of a node: its socket, its greeting, what it sent in part, what it has not yet taken.

What always holds: nothing is answered before the greeting; answers go out in the order of their requests;
whatever the client sends or leaves unread costs this connection only, and it is told why if it still listens.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from typing import TYPE_CHECKING, Protocol

import structlog

from ems.config import format_size
from ems.errors import EmsError, ProtocolError
from ems.pool.core.handover import ConnectionState, QuestionState
from ems.pool.protocol import coding, framing, greeting, messages, refusals
from ems.pool.tenants.gate import Guest, Peer, Pending

if TYPE_CHECKING:
    import asyncio

MAX_UNSENT = 8 << 20
"""Bytes of answers that may wait for a client that does not read; above, its connection ends."""
READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""
MAX_DESCRIPTORS_UNREAD = 16
"""Segments that a client may ask for without reading: the system bounds what is on its way for all clients together."""
_SIOCOUTQ = termios.TIOCOUTQ
_UNREAD = struct.Struct("i")
_UCRED = struct.Struct("3i")

_log = structlog.get_logger("ems.node")


class Host(Protocol):
    """What a connection needs of its node."""

    loop: asyncio.AbstractEventLoop

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer) -> Guest | Pending:
        """What becomes of a greeting that came as ``body``."""

    def prove(self, pending: Pending, proof: bytes, peer: Peer) -> tuple[Guest, bytes]:
        """Who answered a challenge, and the node's own proof."""

    def welcome(self, owner: int, guest: Guest, version: int, signature: bytes) -> messages.Welcome:
        """The answer to a good greeting of ``guest``."""

    def answer(self, owner: int, request: messages.Request) -> messages.Answer | None:
        """Do what a greeted client asks; None for requests that have no answer."""

    def opened(self, segment: int) -> int:
        """A descriptor of a segment's file that is passed to a client, and closed then."""

    def answered(self) -> None:
        """All that came in together has been answered."""

    def known(self, owner: int) -> Guest:
        """Whom a connection that another process let in belongs to."""

    def forget(self, owner: int, reason: str | None) -> None:
        """The connection of ``owner`` ended."""


class Connection:
    """One client: its socket, what it has sent, what it has not yet taken."""

    def __init__(self, node: Host, sock: socket.socket, owner: int, now: float) -> None:
        self._node = node
        self._sock = sock
        self._owner = owner
        self._greet_before = now + greeting.GREETING_SECONDS
        self._reader = framing.FrameReader(framing.MAX_GREETING)
        self._greeted = False
        self._version = 0
        self._pending: Pending | None = None
        self._unsent = bytearray()
        self._held = bytearray()
        """Answers that leave with the next one."""
        self._descriptors_unread = 0
        """Descriptors that were sent since the client was known to have read all answers."""
        self.pid, self.uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self.client = "unknown"
        self.features: frozenset[str] = frozenset()
        """What the client says that it understands."""
        self.guest = Guest(administers=False, stores=False)
        """Whom the connection belongs to; nobody before the greeting is over."""

    def snapshot(self) -> ConnectionState:
        """What is known of the client, for a node that takes over."""
        received, unsent = self._reader.pending, bytes(self._unsent)
        features, asked = sorted(self.features), self._pending
        question = None
        if asked is not None:
            told = asked.challenge
            question = QuestionState(
                asked.access_id, self._version, told.nonce, told.salt, told.iterations, asked.transcript
            )
        return ConnectionState(self._owner, self._greeted, self.client, received, unsent, features, question)

    def resume(self, state: ConnectionState) -> None:
        """Go on from a :meth:`snapshot` and begin to read.

        Who has not greeted yet may take its time anew: it could not while the process changed.
        """
        self._greeted, self.client = state.greeted, state.client
        self.guest = self._node.known(self._owner)
        self.features = frozenset(state.features)
        asked = state.question
        if asked is not None:
            challenge = messages.Challenge(asked.nonce, asked.salt, asked.iterations)
            self._version, self._pending = asked.version, Pending(asked.access_id, challenge, asked.transcript)
        if self._greeted:
            self._reader.limit = framing.MAX_FRAME
        self._reader.feed(state.received)
        self._unsent += state.unsent
        if self._unsent:
            self._node.loop.add_writer(self._sock, self._on_writable)
        self._node.loop.add_reader(self._sock, self.on_readable)

    @property
    def sock(self) -> socket.socket:
        """The client's socket."""
        return self._sock

    def leave(self) -> None:
        """Let go of the socket, on which another process goes on."""
        self._node.loop.remove_reader(self._sock)
        self._node.loop.remove_writer(self._sock)
        self._sock.close()

    @property
    def greeted(self) -> bool:
        """Whether the client has said hello, and proven who it is where that is asked for."""
        return self._greeted

    @property
    def peer(self) -> Peer:
        """Who is at the other end, as the kernel says."""
        return Peer(self.pid, self.uid)

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
                self._handle(coding.decode_request(body), body)
                if self._sock.fileno() < 0:
                    return
            self._send_held()
        except ProtocolError as error:
            self.refuse(error)
        except Exception:  # noqa: BLE001 - the root of what a client sets off, see below
            # Root of all that a client can set off: a defect here costs the one who found it, not the others.
            _log.exception("a request brought up a defect", client=self.client, pid=self.pid)
            self.refuse(ProtocolError("the node has a defect that this request brought up, see its log"))
        self._node.answered()

    def _handle(self, request: messages.Request, body: bytes) -> None:
        if isinstance(request, messages.Hello):
            self._greet(request, body)
            return
        if isinstance(request, messages.Prove):
            self._prove(request)
            return
        if not self._greeted:
            raise ProtocolError(f"{type(request).__name__} came before the greeting, say Hello first")
        try:
            answer = self._node.answer(self._owner, request)
        except ProtocolError:
            raise
        except EmsError as error:
            answer = refusals.refusal(error)
        if answer is None:
            return
        if isinstance(answer, messages.SegmentAttached):
            self._send_descriptor(answer)
        else:
            self.send(coding.encode(answer))

    def _greet(self, hello: messages.Hello, body: bytes) -> None:
        if self._greeted or self._pending is not None:
            raise ProtocolError("a second Hello on one connection")
        self.client = hello.client
        self.features = frozenset(hello.features)
        try:
            self._version = greeting.negotiate(hello.oldest, hello.newest)
            outcome = self._node.greet(hello, body, self.peer)
        except ProtocolError:
            raise
        except EmsError as error:
            self.refuse(error)
            return
        if isinstance(outcome, Pending):
            self._pending = outcome
            self.send(coding.encode(outcome.challenge))
        else:
            self._let_in(outcome, b"")

    def _prove(self, request: messages.Prove) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            raise ProtocolError("a proof that nobody asked for")
        try:
            guest, signature = self._node.prove(pending, request.proof, self.peer)
        except ProtocolError:
            raise
        except EmsError as error:
            self.refuse(error)
            return
        self._let_in(guest, signature)

    def _let_in(self, guest: Guest, signature: bytes) -> None:
        self._greeted = True
        self.guest = guest
        self._reader.limit = framing.MAX_FRAME
        self.send(coding.encode(self._node.welcome(self._owner, guest, self._version, signature)))

    def check_greeting(self, now: float) -> None:
        """End the connection if its client should have greeted by ``now``."""
        if not self._greeted and now >= self._greet_before:
            self.refuse(ProtocolError(f"the client did not greet within {greeting.GREETING_SECONDS:.0f} s"))

    def refuse(self, error: EmsError) -> None:
        """Tell the client why, and end the connection."""
        self._send_held()
        self.send(coding.encode(refusals.refusal(error)), hold=False)
        self.close(str(error))

    def send(self, data: bytes, *, hold: bool = True) -> None:
        """Send ``data``, keeping what the socket does not take now.

        With ``hold`` it may leave together with answers to requests that came with this one, so that who asked is
        woken once: a client on a processor that the node needs for the second answer would delay that.
        """
        if self._sock.fileno() < 0:
            return
        if hold and self._reader.more and len(self._held) < READ_SIZE:
            self._held += data
            return
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
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

    def _send_held(self) -> None:
        if self._held:
            self.send(b"", hold=False)

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

    def _send_descriptor(self, answer: messages.SegmentAttached) -> None:
        data = coding.encode(answer)
        self._send_held()
        if self._sock.fileno() < 0:
            return
        if self._unsent:
            self.refuse(ProtocolError("a segment was asked for while earlier answers wait to be read"))
            return
        unread = _UNREAD.unpack(fcntl.ioctl(self._sock, _SIOCOUTQ, bytes(_UNREAD.size)))[0]
        self._descriptors_unread = self._descriptors_unread + 1 if unread else 1
        if self._descriptors_unread > MAX_DESCRIPTORS_UNREAD:
            self.refuse(ProtocolError(f"{MAX_DESCRIPTORS_UNREAD} segments were asked for and none was taken"))
            return
        try:
            descriptor = self._node.opened(answer.segment)
            try:
                sent = socket.send_fds(self._sock, [data], [descriptor])
            finally:
                os.close(descriptor)
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
