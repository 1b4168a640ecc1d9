"""One client of a node: its socket, its greeting, what it sent in part, what it has not yet taken.

What always holds: nothing is answered before the greeting; answers go out in the order of their requests, and what
takes long is done a step at a time, when it is this connection's turn; nothing is read from it meanwhile;
whatever the client sends or leaves unread costs this connection only, and it is told why if it still listens.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Generator
from math import inf
from typing import TYPE_CHECKING

import structlog

from ems.config import format_size
from ems.errors import EmsError, ProtocolError
from ems.pool.keys import KEY_BYTES
from ems.pool.processes import peer_of
from ems.pool.protocol import coding, limits, messages
from ems.pool.service.handling import MOST_AT_ONCE, STEP
from ems.pool.service.storing import Steps
from ems.pool.tenants.gate import Peer, Pending, Principal

if TYPE_CHECKING:
    from ems.pool.node.pool_node import Node

MAX_UNSENT = 8 << 20
"""Bytes of answers that may wait for a client that does not read; above, its connection ends."""
READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""
FRAME_WORK = 16
"""Work of a request beside that of the keys in it."""
TURN = 256
"""Work of one turn; it may be more by one request, or one step."""
TAIL_WEIGHT = 256
"""Bytes that a tail takes in memory beside those that came."""
MAX_DESCRIPTORS_UNREAD = 16
"""Segments that a client may ask for without reading: the system bounds what is on its way for all clients together."""
_SIOCOUTQ = termios.TIOCOUTQ
_UNREAD = struct.Struct("i")

_log = structlog.get_logger("ems.node")

AnswerSteps = Steps[messages.Answer | None]


class Connection:
    """One client: its socket, what it has sent, what it has not yet taken."""

    def __init__(self, node: Node, sock: socket.socket, client_id: int, now: float) -> None:
        self._node = node
        self._sock = sock
        self._owner = client_id
        self._greet_before = now + limits.GREETING_SECONDS
        self._frame_before = inf
        """When the frame must be whole that has come in part."""
        self._kept = 0
        """Bytes that the node was told are kept for the client."""
        self._reader = coding.FrameReader(coding.MAX_GREETING)
        self.greeted = False
        self._steps: AnswerSteps | None = None
        """What is left of a request that was begun."""
        self._begun = 0
        """Bytes of that request."""
        self._waits = False
        """Whether that goes on only when something else has come."""
        self._paused = False
        """Whether nothing is read until what came is done."""
        self._ended = False
        """Whether the client will send no more."""
        self._version = 0
        self._pending: Pending | None = None
        self._unsent = bytearray()
        self._held = bytearray()
        """Answers that leave with the next one."""
        self._descriptors_unread = 0
        """Descriptors that were sent since the client was known to have read all answers."""
        self.peer = Peer(*peer_of(sock))
        self.pid, self.uid = self.peer
        self.party = f"user {self.uid}"
        """With whom the connection takes turns."""
        self.client = "unknown"
        self.instance = b""
        """A random number by which the client knows what it was promised on other connections, if it has one."""
        self.administers = False
        """Whether the client says that it looks after the node."""

    def on_readable(self) -> None:
        try:
            data = self._sock.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if data:
            self._reader.feed(data)
            self._node.rounds.has_work(self)
        elif self._unfinished:
            self._ended = True
            self._pause()
        else:
            self.close(None)

    @property
    def busy(self) -> bool:
        """Whether something can be done that came, or was begun."""
        return self._unfinished and not self._waits

    @property
    def _unfinished(self) -> bool:
        return self._steps is not None or self._reader.more

    def turn(self) -> int:
        """Do what came, as far as one turn goes; how much work that was."""
        work = 0
        try:
            while work < TURN and not self._waits:
                steps = self._steps
                if steps is not None:
                    work += STEP
                    self._go_on(steps)
                else:
                    body = self._reader.next()
                    if body is None:
                        break
                    work += FRAME_WORK + min(len(body) // KEY_BYTES, MOST_AT_ONCE)
                    self._frame_before = inf
                    request = coding.decode_request(body)
                    self._handle(request, body)
                    if self._steps is not None:
                        tails = request.tails if isinstance(request, messages.Reserve) else None
                        self._begun = len(body) + TAIL_WEIGHT * len(tails or ())
                        work += STEP
                if self._sock.fileno() < 0:
                    return work
            self._send_held()
        except EmsError as error:  # before the greeting is over any, later those of the protocol
            self.refuse(error)
        except Exception:  # noqa: BLE001 - root of all that a client can set off: a defect costs who found it alone
            _log.exception("a request brought up a defect", client=self.client, pid=self.pid)
            self.refuse(ProtocolError("the node has a defect that this request brought up, see its log"))
        self._node.answered()
        self._read_on()
        return work

    def _read_on(self) -> None:
        """Read on once all that came is done, and note what came in part."""
        if self._unfinished:
            self._pause()
        elif self._ended:
            self.close(None)
        elif self._paused and self._sock.fileno() >= 0:
            self._paused = False
            self._node.loop.add_reader(self._sock, self.on_readable)
        if self._reader.size and self._frame_before == inf:
            self._frame_before = self._node.clock() + limits.FRAME_SECONDS
        self._keep()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._node.loop.remove_reader(self._sock)

    def _keep(self) -> None:
        """Tell the node of what came in part, is under way or was not taken, if that is more or less than it was."""
        kept = self._reader.size + len(self._held) + len(self._unsent) + (self._begun if self._steps is not None else 0)
        if kept != self._kept and self._sock.fileno() >= 0:
            self._kept = kept
            self._node.clients.keeps(self._owner, kept)

    def _handle(self, request: messages.Request, body: bytes) -> None:
        if isinstance(request, messages.Hello):
            self._greet(request, body)
            return
        if isinstance(request, messages.Prove):
            self._prove(request)
            return
        if not self.greeted:
            raise ProtocolError(f"{type(request).__name__} came before the greeting, say Hello first")
        try:
            answer = self._node.answer(self._owner, request)
        except EmsError as error:
            answer = _refusal(error)
        if isinstance(answer, Generator):
            self._go_on(answer)
        else:
            self._reply(answer)

    def _go_on(self, steps: AnswerSteps) -> None:
        """Take a step of what was begun; the answer follows the last one."""
        self._steps = None
        answer: messages.Answer | None
        try:
            waking = next(steps)
        except StopIteration as end:
            answer = end.value
        except EmsError as error:
            answer = _refusal(error)
        else:
            self._steps = steps
            if waking is not None:
                self._waits = True
                waking(self._wake)
            return
        self._reply(answer)

    def _wake(self) -> None:
        self._waits = False
        if self._steps is not None:
            self._node.rounds.has_work(self)

    def _reply(self, answer: messages.Answer | None) -> None:
        if answer is None:
            return
        if isinstance(answer, messages.SegmentAttached):
            self._send_descriptor(answer)
        else:
            self.send(coding.encode(answer))

    def _greet(self, hello: messages.Hello, body: bytes) -> None:
        if self.greeted or self._pending is not None:
            raise ProtocolError("a second Hello on one connection")
        self.client = hello.client
        self.instance = hello.instance
        self.administers = hello.administers
        self._version = coding.negotiate(hello.oldest, hello.newest)
        outcome = self._node.tenancy.gate.greet(hello, body, self.peer, self._node.clock())
        if isinstance(outcome, Pending):
            self._pending = outcome
            self.send(coding.encode(outcome.challenge))
        else:
            self._let_in(outcome, b"")

    def _prove(self, request: messages.Prove) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            raise ProtocolError("a proof that nobody asked for")
        now, wall = self._node.clock(), self._node.wall()
        principal, signature = self._node.tenancy.gate.prove(pending, request.proof, self.peer, now, wall)
        self._let_in(principal, signature)

    def _let_in(self, principal: Principal, signature: bytes) -> None:
        welcome = self._node.clients.welcome(self._owner, principal, self._version, signature)
        self.greeted = True
        self._reader.limit = coding.MAX_FRAME
        self.send(coding.encode(welcome))

    def check_deadlines(self, now: float) -> None:
        """End the connection if its client should have greeted, or finished a frame, by ``now``."""
        if not self.greeted and now >= self._greet_before:
            self.refuse(ProtocolError(f"the client did not greet within {limits.GREETING_SECONDS:.0f} s"))
        elif self._reader.size and now >= self._frame_before and not self._unfinished:
            self.refuse(ProtocolError(f"a frame was begun and not finished within {limits.FRAME_SECONDS:.0f} s"))

    def refuse(self, error: EmsError) -> None:
        self._send_held()
        self.send(coding.encode(coding.refusal(error)), hold=False)
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
        self._keep()

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
            descriptor = self._node.arena.opened(answer.segment)
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
        steps, self._steps = self._steps, None
        self._reader = coding.FrameReader()
        if steps is not None:
            steps.close()
        self._node.clients.forget(self._owner, reason)


def _refusal(error: EmsError) -> messages.Refused:
    """The answer to a request that is refused.  Raises ProtocolError: it ends its connection instead."""
    if isinstance(error, ProtocolError):
        raise error
    return coding.refusal(error)
