"""How an engine talks to its node: a blocking client for engine threads, safe for several at once.

Every call carries a deadline.  A client that lost its node says so at once on each call
(:class:`~ems.errors.PoolUnavailable`) and tries to reach it again by itself, at most every
:data:`RETRY_SECONDS`; namespaces are opened again on the new connection.  Nothing of an old connection is
used on a new one: reservations and leases carry the epoch of the connection that they were made on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ems.errors import PoolRefused, PoolTimeout, PoolUnavailable, ProtocolError, StaleReference
from ems.pool import protocol
from ems.pool.changes import FROM_NOW, Run
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import PageRef, SlotState, header_offset, unpack_header, unpack_refs
from ems.pool.lease import Lease

CALL_SECONDS = 5.0
"""Deadline of a call that names none."""
RETRY_SECONDS = 0.5
"""Least time between two attempts to reach a node that is gone; doubles with each failure in a row."""
MAX_RETRY_SECONDS = 8.0
"""Most time between two attempts."""
_UCRED = struct.Struct("3i")
_READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""

_Answer = TypeVar("_Answer", bound=protocol.Message)


class Namespace(msgspec.Struct, frozen=True):
    """A namespace as a caller names it: its full name and the bytes of one page."""

    name: str
    page_size: int


class Hits(msgspec.Struct, frozen=True):
    """Answer to a lookup: leading pages present, pages after these present or being written, a lease if asked for."""

    count: int
    pending: int
    lease: Lease | None


class TailHit(msgspec.Struct, frozen=True):
    """Answer to a lookup of a tail: ``tokens`` that a page shares, its key, whether more is being written, a lease."""

    tokens: int
    key: bytes
    pending: bool
    lease: Lease | None


class Place(msgspec.Struct, frozen=True):
    """How far a client has read of a node's changes."""

    node: str
    sequence: int


class PoolChanges(msgspec.Struct, frozen=True):
    """Changes up to ``place``; with ``lost`` there were others: the node forgot some, or was started again.

    A run's ``namespace`` is a position in the list that was asked for.
    """

    place: Place
    lost: bool
    runs: tuple[Run, ...]


class Reservation(msgspec.Struct, frozen=True):
    """Slots promised to a writer: ``granted`` maps the position of a key to its slot, ``outcomes`` has all keys."""

    epoch: int
    number: int
    outcomes: bytes
    granted: dict[int, PageRef]


class SegmentMap:
    """Segments of one node, mapped into this process when they are first needed."""

    def __init__(self, client: PoolClient, epoch: int) -> None:
        self._client = client
        self._epoch = epoch
        self._maps: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    def segment(self, number: int) -> memoryview:
        """The whole segment, writable."""
        mapped = self._maps.get(number)
        if mapped is None:
            with self._lock:
                mapped = self._maps.get(number)
                if mapped is None:
                    mapped = self._client.attach(number, self._epoch)
                    self._maps[number] = mapped
        return mapped

    def mapped(self) -> list[memoryview]:
        """Segments that were mapped until now."""
        return list(self._maps.values())

    def page(self, ref: PageRef, size: int) -> memoryview:
        """The ``size`` bytes of a page's slot."""
        return self.segment(ref.segment)[ref.offset : ref.offset + size]

    def holds(self, ref: PageRef, key: bytes) -> bool:
        """Whether the slot of ``ref`` holds, at this moment, the whole committed page of ``key``."""
        state, generation, found, _ = unpack_header(self.segment(ref.segment), header_offset(ref.slot))
        return state == SlotState.PRESENT and generation == ref.generation and found == key


class _Connection:
    """One greeted socket, the namespaces opened on it and the segments mapped through it."""

    def __init__(self, sock: socket.socket, epoch: int, welcome: protocol.Welcome, segments: SegmentMap) -> None:
        self.sock = sock
        self.epoch = epoch
        self.welcome = welcome
        self.segments = segments
        self.namespaces: dict[Namespace, int] = {}


class PoolClient:
    """A connection to the node of this host that mends itself.

    ``name`` is what the node's log and ``ems status`` call this client.  ``let_go`` is called with each segment that
    was mapped when its connection ends, before the memory is unmapped.
    """

    def __init__(self, path: Path, name: str = "engine", let_go: Callable[[memoryview], None] | None = None) -> None:
        self._path = path
        self._name = name
        self._let_go = let_go
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        self._epoch = 0
        self._next_attempt = 0.0
        self._failures = 0
        self._closed = False

    # Connection

    @property
    def epoch(self) -> int:
        """Number of the present connection; 0 while there is none."""
        connection = self._connection
        return connection.epoch if connection else 0

    @property
    def connected(self) -> bool:
        """Whether the last call left a connection behind; no promise for the next."""
        return self._connection is not None

    @property
    def autostarted(self) -> bool | None:
        """Whether the node was started by an engine; None before the first connection."""
        connection = self._connection
        return connection.welcome.autostarted if connection else None

    @property
    def node(self) -> str:
        """Identity of the node, new with each of its starts; empty while there is no connection."""
        connection = self._connection
        return connection.welcome.node if connection else ""

    @property
    def node_pid(self) -> int:
        """The process that listens on the node's socket, as the kernel says; 0 if it cannot be seen from here.

        Raises:
            PoolUnavailable: there is no connection.
        """
        connection = self._connection
        if connection is None:
            raise PoolUnavailable(f"there is no connection to a pool node on {self._path}")
        pid: int = _UCRED.unpack(connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
        return pid

    @property
    def segment_count(self) -> int:
        """Segments of the node; 0 while there is no connection."""
        connection = self._connection
        return connection.welcome.segments if connection else 0

    def connect(self, timeout: float = CALL_SECONDS) -> None:
        """Make sure that there is a connection.

        Raises:
            PoolUnavailable: no node answers, or it was tried less than :data:`RETRY_SECONDS` ago.
            PoolTimeout: the node did not greet in ``timeout`` seconds.
            PoolRefused: the node does not want this client.
        """
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            self._connected(deadline)

    @contextlib.contextmanager
    def _locked(self, timeout: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(timeout, 0)):
            raise PoolTimeout(f"another call kept the connection to the pool busy for {timeout:.1f} s")
        try:
            yield
        finally:
            self._lock.release()

    def _connected(self, deadline: float) -> _Connection:
        if self._connection is not None:
            return self._connection
        now = time.monotonic()
        if self._closed or now < self._next_attempt:
            raise PoolUnavailable(f"no pool node answers on {self._path}, start one with 'ems node'")
        try:
            connection = self._greet(now, deadline)
        except BaseException:
            self._put_off()
            raise
        self._failures = 0
        self._connection = connection
        return connection

    def _put_off(self) -> None:
        pause = min(RETRY_SECONDS * 2**self._failures, MAX_RETRY_SECONDS)
        self._failures += 1
        self._next_attempt = time.monotonic() + pause

    def _greet(self, now: float, deadline: float) -> _Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - now, 0.001))
            sock.connect(str(self._path))
            hello = protocol.Hello(protocol.OLDEST_VERSION, protocol.NEWEST_VERSION, self._name, os.getpid())
            sock.sendall(protocol.encode(hello))
            answer = protocol.decode_answer(_receive_frame(sock, deadline))
        except TimeoutError as error:
            sock.close()
            raise PoolTimeout(f"the pool node on {self._path} did not greet in time") from error
        except OSError as error:
            sock.close()
            raise PoolUnavailable(
                f"no pool node answers on {self._path} ({error.strerror or error}), start one with 'ems node' or name "
                "another socket"
            ) from error
        except BaseException:
            sock.close()
            raise
        if isinstance(answer, protocol.Refused):
            sock.close()
            protocol.raise_refusal(answer)
        if not isinstance(answer, protocol.Welcome):
            sock.close()
            raise ProtocolError(f"the node answered the greeting with {type(answer).__name__}")
        self._epoch += 1
        return _Connection(sock, self._epoch, answer, SegmentMap(self, self._epoch))

    def notice(self) -> None:
        """Let go of a connection that the node has ended, and of its memory; never waits.

        For a client that makes no calls for a while: a node that starts again needs the memory of the old one.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            connection = self._connection
            # Between calls the node has nothing to say: what can be read is the end.
            if connection is not None:
                readable = select.poll()  # select() refuses descriptors above 1023, of which engines have many
                readable.register(connection.sock, select.POLLIN)
                if readable.poll(0):
                    self._drop()
        finally:
            self._lock.release()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.sock.close()
        if self._let_go is not None:
            for mapped in connection.segments.mapped():
                self._let_go(mapped)

    def close(self) -> None:
        """End the connection for good; a call that waits for its answer in another thread fails now."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection, which goes on unharmed.  Takes no lock."""
        self._closed = True
        self._drop()

    # Calls

    def _call(self, request: protocol.Request, expected: type[_Answer], timeout: float, epoch: int = 0) -> _Answer:
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            connection = self._connected(deadline)
            if epoch and connection.epoch != epoch:
                raise StaleReference("the connection to the pool was lost since, begin again")
            return self._ask(connection, request, expected, deadline)

    def _ask(
        self, connection: _Connection, request: protocol.Request, expected: type[_Answer], deadline: float
    ) -> _Answer:
        frame = protocol.encode_request(request)
        try:
            connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sock.sendall(frame)
            answer = protocol.decode_answer(_receive_frame(connection.sock, deadline))
        except TimeoutError as error:
            # A late answer would be taken for the next one's: this connection cannot be used any more.
            self._drop()
            self._put_off()
            raise PoolTimeout("the pool node did not answer in time") from error
        except OSError as error:
            self._drop()
            raise PoolUnavailable(f"the pool node went away: {error.strerror or error}") from error
        except BaseException:
            # Whatever broke in here (an interrupt, too): the next call must not take this one's answer for its own.
            self._drop()
            raise
        if isinstance(answer, protocol.Refused):
            protocol.raise_refusal(answer)
        if not isinstance(answer, expected):
            self._drop()
            raise ProtocolError(f"the node answered {type(answer).__name__}, expected {expected.__name__}")
        return answer

    def _opened(self, namespace: Namespace, deadline: float) -> tuple[_Connection, int | None]:
        connection = self._connected(deadline)
        number = connection.namespaces.get(namespace)
        if number is None:
            request = protocol.Open(namespace.name, namespace.page_size)
            number = self._ask(connection, request, protocol.Opened, deadline).namespace
            if number < 0:
                return connection, None
            connection.namespaces[namespace] = number
        return connection, number

    def open(self, namespace: Namespace, timeout: float = CALL_SECONDS) -> None:
        """Make sure that the node knows ``namespace``; the other verbs do this by themselves.

        Raises:
            NoSpace: a page of that size fits in no segment of the node.
            PoolRefused: the namespace exists with another page size.
        """
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            self._opened(namespace, deadline)

    def lookup(self, namespace: Namespace, keys: bytes, *, lease: bool = False, timeout: float = CALL_SECONDS) -> Hits:
        """How many leading ``keys`` (16 bytes each, joined) are present; with ``lease`` they stay until released."""
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            connection, number = self._opened(namespace, deadline)
            if number is None:
                return Hits(0, 0, None)
            answer = self._ask(connection, protocol.Lookup(number, keys, lease), protocol.Hits, deadline)
            held = Lease(connection.welcome.node, connection.epoch, answer.lease, answer.refs) if answer.lease else None
            return Hits(answer.count, answer.pending, held)

    def lookup_tail(
        self, namespace: Namespace, tail: Tail, *, lease: bool = False, timeout: float = CALL_SECONDS
    ) -> TailHit:
        """The page that shares most leading tokens with ``tail``; with ``lease`` it stays until released."""
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            connection, number = self._opened(namespace, deadline)
            if number is None:
                return TailHit(0, b"", pending=False, lease=None)
            answer = self._ask(connection, protocol.Lookup(number, b"", lease, tail), protocol.Hits, deadline)
            held = Lease(connection.welcome.node, connection.epoch, answer.lease, answer.refs) if answer.lease else None
            return TailHit(answer.count, answer.key, bool(answer.pending), held)

    def release(self, lease: Lease) -> None:
        """End a lease; quietly does nothing when the connection that it was made on is gone."""
        with self._lock:
            connection = self._connection
            if connection is None or connection.epoch != lease.epoch:
                return
            try:
                connection.sock.settimeout(CALL_SECONDS)
                connection.sock.sendall(protocol.encode(protocol.Release(lease.number)))
            except OSError:
                self._drop()

    def reserve(
        self,
        namespace: Namespace,
        parent: bytes,
        keys: Sequence[bytes],
        timeout: float = CALL_SECONDS,
        tail: Tail | None = None,
    ) -> Reservation:
        """Ask for slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        With ``tail`` the last of them is its key: a block that is not full.
        """
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            connection, number = self._opened(namespace, deadline)
            if number is None:
                raise PoolRefused(
                    f"namespace {namespace.name} was opened without a page size, so nothing can be stored"
                )
            request = protocol.Reserve(number, parent, b"".join(keys), tail)
            answer = self._ask(connection, request, protocol.Granted, deadline)
            positions = [position for position, outcome in enumerate(answer.outcomes) if outcome == 0]
            refs = unpack_refs(answer.refs)
            if len(positions) != len(refs) or len(answer.outcomes) * KEY_BYTES != len(request.keys):
                self._drop()
                raise ProtocolError("the node's answer to a reservation does not match the request")
            granted = dict(zip(positions, refs, strict=True))
            return Reservation(connection.epoch, answer.reservation, answer.outcomes, granted)

    def commit(
        self, reservation: Reservation, positions: list[int] | None = None, timeout: float = CALL_SECONDS
    ) -> None:
        """Publish pages of a reservation whose bytes are in their slots; no call when none were granted.

        Raises:
            StaleReference: the reservation ended with its connection; nothing was published.
        """
        if reservation.granted:
            request = protocol.Commit(reservation.number, positions)
            self._call(request, protocol.Done, timeout, reservation.epoch)

    def abort(self, reservation: Reservation, timeout: float = CALL_SECONDS) -> None:
        """Give back what of a reservation was not committed; no call when none were granted.

        Raises:
            StaleReference: the reservation ended with its connection already.
        """
        if reservation.granted:
            self._call(protocol.Abort(reservation.number), protocol.Done, timeout, reservation.epoch)

    def stats(self, timeout: float = CALL_SECONDS) -> dict[str, object]:
        """The node's figures."""
        return self._call(protocol.Stats(), protocol.Figures, timeout).figures

    def changes(self, since: Place | None, namespaces: Sequence[str], timeout: float = CALL_SECONDS) -> PoolChanges:
        """What was stored and removed in ``namespaces`` since an earlier answer; None begins now and tells nothing.

        Raises:
            PoolRefused: the node is of an earlier release, which does not tell.
        """
        deadline = time.monotonic() + timeout
        with self._locked(timeout):
            connection = self._connected(deadline)
            if protocol.TELLS_CHANGES not in connection.welcome.features:
                raise PoolRefused(
                    f"the pool node (release {connection.welcome.release}) does not tell what it stores and removes, "
                    "restart it with this release"
                )
            node = connection.welcome.node
            known = since is not None and since.node == node
            sequence = since.sequence if since is not None and known else FROM_NOW
            answer = self._ask(connection, protocol.Changes(sequence, list(namespaces)), protocol.Changed, deadline)
            lost = answer.lost or (since is not None and not known)
            return PoolChanges(Place(node, answer.sequence), lost, tuple(answer.runs))

    # Memory

    def segments(self, epoch: int) -> SegmentMap:
        """The mapped segments of the connection ``epoch``.

        Raises:
            StaleReference: that connection is gone.
        """
        connection = self._connection
        if connection is None or connection.epoch != epoch:
            raise StaleReference("the connection to the pool was lost since, begin again")
        return connection.segments

    def attach(self, number: int, epoch: int) -> memoryview:
        """Map segment ``number``; callers use :class:`SegmentMap`, which does it once."""
        with self._lock:
            connection = self._connection
            if connection is None or connection.epoch != epoch:
                raise StaleReference("the connection to the pool was lost since, begin again")
            descriptors: list[int] = []
            try:
                return self._attach(connection, number, descriptors)
            except TimeoutError as error:
                self._drop()
                self._put_off()
                raise PoolTimeout(f"the pool node did not hand out segment {number} in time") from error
            except OSError as error:
                self._drop()
                raise PoolUnavailable(f"segment {number} cannot be mapped: {error.strerror or error}") from error
            except PoolRefused:
                raise
            except BaseException:
                self._drop()
                raise
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    @staticmethod
    def _attach(connection: _Connection, number: int, descriptors: list[int]) -> memoryview:
        deadline = time.monotonic() + CALL_SECONDS
        connection.sock.settimeout(CALL_SECONDS)
        connection.sock.sendall(protocol.encode(protocol.Attach(number)))
        answer = protocol.decode_answer(_receive_frame(connection.sock, deadline, descriptors))
        if isinstance(answer, protocol.Refused):
            protocol.raise_refusal(answer)
        if not isinstance(answer, protocol.SegmentAttached) or len(descriptors) != 1:
            raise ProtocolError("the node sent no segment")
        return memoryview(mmap.mmap(descriptors[0], answer.size))


def _receive_frame(sock: socket.socket, deadline: float, descriptors: list[int] | None = None) -> bytes:
    """One frame's body, with the file descriptors that came beside it."""
    reader = protocol.FrameReader()
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if descriptors is None:
            data = sock.recv(_READ_SIZE)
        else:
            data, received, _, _ = socket.recv_fds(sock, _READ_SIZE, 4)
            descriptors += received
        if not data:
            raise ConnectionResetError("the node closed the connection")
        reader.feed(data)
        for body in reader.frames():
            return body
