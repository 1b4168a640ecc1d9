"""The connection of a client to its node: it mends itself, carries one call at a time, and maps the node's memory.

A request may be sent ahead of the use of its answer: the node works on it meanwhile, and who makes the next call takes
the answers before its own from the socket for those who wait for them.

What always holds: an answer is taken for that of its own request only; a connection on which anything broke is not used
any more, and what was sent on it and not answered ends with it.  A connection that was lost is tried again by the next
call, when ``retry`` says so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np

from ems.errors import (
    EmsError,
    PoolNotTried,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
    ProtocolError,
    StaleReference,
    Unauthorised,
)
from ems.pool.client.answers import Namespace
from ems.pool.client.introduction import Introduction
from ems.pool.client.retry import ConnectionEnded, Retry
from ems.pool.layout import HEADER, HEADERS_OFFSET, MAGIC, Array, PageRef, carve, generation_of, slot_offset
from ems.pool.protocol import coding, messages

CALL_SECONDS = 5.0
"""Deadline of a call that names none."""

READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""

RESTART_SECONDS = 10.0
"""How long a restart of a node, which takes about a second, may keep an engine's call waiting."""
RESTART_PAUSE = 0.01
"""Seconds between two questions to a node that is about to restart and takes in nothing new."""

Answer = TypeVar("Answer", bound=messages.Message)
Result = TypeVar("Result")


class Pins(Protocol):
    """Who has to know which memory is mapped: the driver of an accelerator."""

    def pin(self, buffer: memoryview) -> None:
        """A segment was mapped."""

    def unpin(self, buffer: memoryview) -> None:
        """A segment is about to be unmapped: no copy to or from it may run any more."""


class SegmentMap:
    """Segments of one node, mapped into this process when they are first needed."""

    def __init__(self, attach: Callable[[int], memoryview], pins: Pins | None) -> None:
        self._attach = attach
        """Maps a segment of the connection that this map belongs to."""
        self._pins = pins
        self._maps: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    def segment(self, number: int) -> memoryview:
        """A segment that is mapped for the first time, or in which something was promised."""
        mapped = self._maps.get(number)
        if mapped is None or _is_dead(mapped):
            with self._lock:
                mapped = self._maps.get(number)
                if mapped is not None and _is_dead(mapped):
                    if self._pins is not None:
                        self._pins.unpin(mapped)
                    mapped = None
                if mapped is None:
                    mapped = self._attach(number)
                    if self._pins is not None:
                        self._pins.pin(mapped)
                    self._maps[number] = mapped
        return mapped

    def mapped(self) -> list[memoryview]:
        return list(self._maps.values())

    def places(self, packed_refs: bytes, size: int) -> tuple[Array, list[memoryview]]:
        """The addresses of slots, for who was promised them, and the memory that they lie in.

        ``size`` is that of the pages of their namespace.  Raises StaleReference: as :meth:`page` does.
        """
        refs = np.frombuffer(packed_refs, "<u4").reshape(-1, len(PageRef._fields))
        starts, segments = np.zeros(len(refs), np.int64), []
        for number in np.unique(refs[:, 0]).tolist():
            mapped = self.segment(number)
            geometry = carve(len(mapped), size)
            headers = np.frombuffer(mapped, HEADER, geometry.slot_count, HEADERS_OFFSET)
            mine = np.flatnonzero(refs[:, 0] == number)
            slots, generations = refs[mine, 1].astype(np.int64), refs[mine, 2]
            promised = slots < len(headers)
            promised[promised] = headers["generation"][slots[promised]] == generations[promised]
            if not promised.all():
                raise _lost(int(slots[promised.argmin()]), number)
            starts[mine] = headers.ctypes.data - HEADERS_OFFSET + geometry.slot_offset(slots)
            segments.append(mapped)
        return starts, segments

    def page(self, ref: PageRef, size: int) -> memoryview:
        """A page's slot, for who was promised it; ``size`` is that of the pages of its namespace.

        Raises StaleReference: the slot, or the segment's memory, is another's by now.
        """
        segment = self.segment(ref.segment)
        if generation_of(segment, ref.slot) != ref.generation:
            raise _lost(ref.slot, ref.segment)
        begin = slot_offset(len(segment), size, ref.slot)
        return segment[begin : begin + size]


class Connection(msgspec.Struct):
    """One greeted socket, the namespaces opened on it and the segments mapped through it."""

    sock: socket.socket
    epoch: int
    welcome: messages.Welcome
    segments: SegmentMap
    tenant: str
    """Whose pages it is for; empty on an open node."""
    namespaces: dict[Namespace, int] = msgspec.field(default_factory=dict)
    described: dict[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """What the node was told of namespaces."""
    sent: deque[Sent[messages.Message]] = msgspec.field(default_factory=deque)
    """What was not answered, in the order in which it was sent."""
    reader: coding.FrameReader = msgspec.field(default_factory=coding.FrameReader)


class Sent(Generic[Answer]):
    """A request on the connection ``epoch``, and its answer or what became of it instead once that is known."""

    def __init__(self, epoch: int, expected: type[Answer]) -> None:
        self.epoch = epoch
        self.expected = expected
        self.answer: messages.Answer | None = None
        self.failure: EmsError | None = None

    @property
    def over(self) -> bool:
        return self.answer is not None or self.failure is not None


class Turn:
    """The one call that is under way: its connection, and by when it is to be over."""

    def __init__(self, line: Line, connection: Connection, deadline: float) -> None:
        self._line = line
        self.connection = connection
        self.deadline = deadline

    def ask(self, request: messages.Request, expected: type[Answer]) -> Answer:
        """The node's answer, of the type ``expected``.

        Raises EmsError: the node refuses, or there is no (sound) answer before the deadline.
        """
        return self._line.ask(self.connection, request, expected, self.deadline)

    def send(self, request: messages.Request, expected: type[Answer]) -> Sent[Answer]:
        """Ask for what :meth:`Line.answer` waits for later.  Raises EmsError: it cannot be sent."""
        return self._line.send(self.connection, request, expected, self.deadline)


class Line:
    """``pins`` is told of each segment that is mapped, and before it is unmapped.

    A call that waits out a restart may take ``restart_seconds``, where its own time is shorter.
    """

    def __init__(self, introduction: Introduction, pins: Pins | None = None, restart_seconds: float = 0.0) -> None:
        self._introduction = introduction
        self._pins = pins
        self._lock = threading.RLock()
        self.connection: Connection | None = None
        """The present one; what the last call left behind, and no promise for the next."""
        self._epoch = 0
        self._retry = Retry()
        self._closed = False
        self._restart_seconds = restart_seconds
        self.waits_out_restart = False

    def call(self, timeout: float | None, work: Callable[[Turn], Result], *, again: bool = True) -> Result:
        """Do ``work`` in a turn, and wait out a restart of the node for ``timeout`` seconds in all.

        With ``again`` work whose connection ended is done once more on a new one: it may not rely on the old one, and
        may have been done already.  Raises EmsError: as :meth:`turn`, and what ``work`` raises.
        """
        deadline = time.monotonic() + (CALL_SECONDS if timeout is None else timeout)
        try:
            if self._epoch and self.connection is None:
                deadline = self._waiting(deadline)  # its end was noticed between two calls
            while True:
                try:
                    with self.turn(deadline - time.monotonic()) as turn:
                        return work(turn)
                except PoolRestarting:
                    deadline = self._waiting(deadline)
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(RESTART_PAUSE)  # bounded by the deadline of this loop
                except ConnectionEnded:
                    if not again:
                        raise
                    again, deadline = False, self._waiting(deadline)
        finally:
            self.waits_out_restart = False

    def _waiting(self, deadline: float) -> float:
        """The node may be restarting: by when the call is to be over."""
        if not self.waits_out_restart:
            self.waits_out_restart = True
            deadline = max(deadline, time.monotonic() + self._restart_seconds)
        return deadline

    @contextlib.contextmanager
    def turn(self, timeout: float | None, epoch: int = 0) -> Iterator[Turn]:
        """Make one call on the connection, which is made first where there is none.

        PoolUnavailable: no node answers.  PoolNotTried: it was tried a moment ago.  PoolTimeout: it did not greet in
        ``timeout`` seconds (:data:`CALL_SECONDS`), or another call took as long.  PoolRefused: it does not want this
        client.  StaleReference: there is another connection by now than ``epoch``, where that is named.
        """
        with self._locked(timeout) as deadline:
            connection = self._connected(deadline)
            if epoch:
                self.at(epoch)
            yield Turn(self, connection, deadline)

    @contextlib.contextmanager
    def _locked(self, timeout: float | None) -> Iterator[float]:
        """Nobody else makes a call; yields the deadline."""
        timeout = CALL_SECONDS if timeout is None else timeout
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0)):
            raise PoolTimeout(f"another call kept the connection to the pool busy for {timeout:.1f} s")
        try:
            yield deadline
        finally:
            self._lock.release()

    def at(self, epoch: int) -> Connection:
        """The connection ``epoch``.  Raises StaleReference: that connection is gone."""
        connection = self.connection
        if connection is None or connection.epoch != epoch:
            raise StaleReference("the connection to the pool was lost since, begin again")
        return connection

    def _connected(self, deadline: float) -> Connection:
        if self.connection is not None:
            return self.connection
        now = time.monotonic()
        if self._closed or not self._retry.due(now):
            if self._retry.refusal is not None and not self._closed:
                raise Unauthorised(*self._retry.refusal.args)
            raise PoolNotTried(f"no pool node answers on {self._introduction.path}, start one with 'ems node'")
        try:
            sock, welcome, tenant = self._introduction.reach(now, deadline)
        except Unauthorised as error:
            self._retry.refused(time.monotonic(), error)
            raise
        except ConnectionEnded:
            if self.waits_out_restart:
                self._retry.failed(time.monotonic(), hung=False)
            raise
        except BaseException as error:
            self._retry.failed(time.monotonic(), hung=isinstance(error, PoolTimeout))
            raise
        self._retry.reached()
        self._epoch += 1
        epoch = self._epoch
        segments = SegmentMap(lambda number: self.attach(number, epoch), self._pins)
        self.connection = Connection(sock, epoch, welcome, segments, tenant)
        return self.connection

    def ask(
        self,
        connection: Connection,
        request: messages.Request,
        expected: type[Answer],
        deadline: float,
        descriptors: list[int] | None = None,
    ) -> Answer:
        """A request and its answer, with the file descriptors that came beside it; needs the lock."""
        return self._answer(connection, self.send(connection, request, expected, deadline), deadline, descriptors)

    def send(
        self, connection: Connection, request: messages.Request, expected: type[Answer], deadline: float
    ) -> Sent[Answer]:
        """Send a request; needs the lock."""
        frame = coding.encode_request(request, connection.welcome.version)
        sent = Sent(connection.epoch, expected)
        if connection.reader.size and not connection.sent:
            self.drop()
            said = connection.reader.next()
            if said is not None and isinstance(why := coding.decode_answer(said), messages.Refused):
                coding.raise_refusal(why)  # it came with the last answer, and the node has gone
            raise ProtocolError("the node said what nobody asked it")
        with self._dropping():
            connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sock.sendall(frame)
        connection.sent.append(sent)  # type: ignore[arg-type] # of any kind
        return sent

    def answer(self, sent: Sent[Answer], timeout: float | None = None) -> Answer:
        """The answer to what was sent in an earlier turn.

        Raises EmsError: as :meth:`Turn.ask`; ConnectionEnded also where its connection ended since.
        """
        with self._locked(timeout) as deadline:
            return self._result(sent) if sent.over else self._answer(self.at(sent.epoch), sent, deadline)

    def _answer(
        self, connection: Connection, sent: Sent[Answer], deadline: float, descriptors: list[int] | None = None
    ) -> Answer:
        """Read answers up to that of ``sent``; needs the lock."""
        with self._dropping():
            while not sent.over:
                body = connection.reader.next()
                if body is None:
                    self._receive(connection, deadline, descriptors)
                else:
                    first = connection.sent.popleft()
                    first.answer = coding.decode_answer(body)
        return self._result(sent)

    def _receive(self, connection: Connection, deadline: float, descriptors: list[int] | None) -> None:
        connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if descriptors is None:
            data = connection.sock.recv(READ_SIZE)
        else:
            data, received, _, _ = socket.recv_fds(connection.sock, READ_SIZE, 4)
            descriptors += received
        if not data:
            raise ConnectionResetError("the node closed the connection")
        connection.reader.feed(data)

    def _result(self, sent: Sent[Answer]) -> Answer:
        """What became of a request that is over."""
        if sent.failure is not None:
            raise sent.failure
        answer = sent.answer
        if isinstance(answer, messages.Refused):
            if answer.code == "unauthorised":
                self.drop()  # the node has ended it
            coding.raise_refusal(answer)
        if not isinstance(answer, sent.expected):
            self.drop()
            raise ProtocolError(f"the node answered {type(answer).__name__}, expected {sent.expected.__name__}")
        return answer

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        """Whatever breaks inside ends the connection."""
        try:
            yield
        except TimeoutError as error:
            # A late answer would be taken for the next one's: this connection cannot be used any more.
            self.drop()
            self._retry.failed(time.monotonic(), hung=True)
            raise PoolTimeout("the pool node did not answer in time") from error
        except OSError as error:
            self.drop()
            raise ConnectionEnded(f"the pool node went away: {error.strerror or error}") from error
        except BaseException:
            # Whatever broke in here (an interrupt, too): the next call must not take this one's answer for its own.
            self.drop()
            raise

    def tell(self, request: messages.Release | messages.Withdraw, epoch: int) -> None:
        """Send what has no answer, if the connection ``epoch`` is still there."""
        with self._lock:
            connection = self.connection
            if connection is None or connection.epoch != epoch:
                return
            try:
                connection.sock.settimeout(CALL_SECONDS)
                connection.sock.sendall(coding.encode(request))
            except OSError:
                self.drop()

    def attach(self, number: int, epoch: int) -> memoryview:
        """Map segment ``number`` of the connection ``epoch``; its :class:`SegmentMap` does it once."""
        with self._lock:
            connection = self.at(epoch)
            descriptors: list[int] = []
            deadline, request = time.monotonic() + CALL_SECONDS, messages.Attach(number)
            try:
                answer = self.ask(connection, request, messages.SegmentAttached, deadline, descriptors)
                return _map(number, answer.size, descriptors)
            except PoolRefused:
                raise
            except BaseException:
                self.drop()
                raise
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def notice(self) -> None:
        """Let go of a connection that the node has ended, and of its memory; never waits.

        For a client that makes no calls for a while: a node that starts again needs the memory of the old one.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            connection = self.connection
            # Where nothing was sent ahead the node has nothing to say between calls: what can be read is the end.
            if connection is not None and not connection.sent:
                readable = select.poll()  # select() refuses descriptors above 1023, of which engines have many
                readable.register(connection.sock, select.POLLIN)
                if readable.poll(0):
                    self.drop()
        finally:
            self._lock.release()

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.sock.close()
        for sent in connection.sent:
            sent.failure = ConnectionEnded("the connection to the pool ended before the node answered")
        connection.sent.clear()
        if self._pins is not None:
            for mapped in connection.segments.mapped():
                self._pins.unpin(mapped)

    def close(self) -> None:
        """End the connection for good; a call that waits for its answer in another thread fails now."""
        self._closed = True
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self.drop()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection, which goes on unharmed.  Takes no lock."""
        self._closed = True
        self.drop()


def _is_dead(mapped: memoryview) -> bool:
    """Whether this is memory that was replaced: it has no description, which the memory of whatever is promised has."""
    return mapped[: len(MAGIC)] != MAGIC


def _lost(slot: int, segment: int) -> StaleReference:
    return StaleReference(f"slot {slot} of segment {segment} is not promised any more, reserve again")


def _map(number: int, size: int, descriptors: list[int]) -> memoryview:
    if len(descriptors) != 1:
        raise ProtocolError("the node sent no segment")
    try:
        return memoryview(mmap.mmap(descriptors[0], size))
    except ValueError as error:
        # Another process of the same tenant did that; the node will have set the segment aside soon.
        raise StaleReference(f"the file of segment {number} was cut short, look again") from error
    except OSError as error:
        raise PoolUnavailable(f"segment {number} cannot be mapped: {error.strerror or error}") from error
