"""The pool node: the daemon of one host, a thin shell around :class:`ems.pool.core.PoolCore`.

It carries bytes between sockets and the brain, writes slot headers before the answer that lets a client see
them, touches memory in the background, and tells the brain who left.  One task reads all sockets, so the
brain needs no lock.  Whatever a client sends, the node lives: a bad message costs its connection only.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import structlog

import ems
from ems.config import NodeConfig, format_size
from ems.errors import ConfigError, EmsError, ProtocolError
from ems.pool import protocol
from ems.pool.arena import Arena
from ems.pool.core import PoolCore, split_keys
from ems.pool.layout import SlotState
from ems.pool.processes import process_lives

TICK_SECONDS = 1.0
GRACE_SECONDS = 0.02
"""A killed process closes its sockets a moment before it is gone; look again after this long."""
MAX_UNSENT = 64 << 20
"""Bytes of answers that may wait for a client that does not read; above, its connection ends."""
READ_SIZE = 256 << 10
_UCRED = struct.Struct("3i")

_log = structlog.get_logger("ems.node")


class _Connection:
    """One client: its socket, what it has sent, what it has not yet taken."""

    def __init__(self, node: Node, sock: socket.socket, owner: int) -> None:
        self._node = node
        self._sock = sock
        self._owner = owner
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
            self.close(error.strerror or str(error))
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
        self._node.core.settle()

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
                self.close(error.strerror or str(error))
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
            self.close(error.strerror or str(error))
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
            sent = socket.send_fds(self._sock, [data], [self._node.arena.descriptor(answer.segment)])
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if sent != len(data):
            self.send(data[sent:])

    def close(self, reason: str | None) -> None:
        """End the connection; ``reason`` is None when the client left by itself."""
        if self._sock.fileno() < 0:
            return
        self._node.loop.remove_reader(self._sock)
        self._node.loop.remove_writer(self._sock)
        self._sock.close()
        self._node.forget(self._owner, reason)


class Node:
    """A running node.  Made and used inside one event loop."""

    def __init__(self, config: NodeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self._clock = clock
        self.node_id = secrets.token_bytes(16)
        self._started = clock()
        self.arena = Arena(config, self.node_id)
        self.core = PoolCore(
            self.arena.sizes, high_watermark=config.high_watermark, eviction_ratio=config.eviction_ratio
        )
        self._names: dict[int, str] = {}
        self._page_sizes: dict[int, int] = {}
        self._connections: dict[int, _Connection] = {}
        self._next_owner = 1
        self._stop_prefault = threading.Event()
        self._prefaulter: threading.Thread | None = None
        self._resting: dict[int, int] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None
        self.refused_connections = 0

    # Life

    def start(self) -> None:
        """Listen; from now on clients are served.

        Raises:
            ConfigError: the socket cannot be made.
        """
        path = self.config.socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            old = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(old)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}; give another path with --socket") from error
        self._listener = listener
        self.loop.add_reader(listener, self._accept)
        self._start_prefault()
        self._tick()

    def _start_prefault(self) -> None:
        if not self.config.prefault:
            for number, size in enumerate(self.arena.sizes):
                self.core.touched(number, size)
            return
        self._prefaulter = threading.Thread(target=self._prefault, name="ems-prefault", daemon=True)
        self._prefaulter.start()

    def _prefault(self) -> None:
        def progress(segment: int, touched: int) -> None:
            self._in_loop(self.core.touched, segment, touched)

        shortage = self.arena.prefault(progress, self._stop_prefault)
        if not self._stop_prefault.is_set():
            self._in_loop(self._prefaulted, shortage)

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        if not self._stop_prefault.is_set():
            self.loop.call_soon_threadsafe(call, *args)

    def _prefaulted(self, shortage: str | None) -> None:
        self.core.touching_ended()
        figures = self.core.stats()
        if shortage is None:
            _log.info("segments touched", bytes=figures["bytes_touched"])
        else:
            _log.warning(
                "shared memory ran out, the pool is smaller than asked for",
                reason=shortage,
                asked=figures["bytes_total"],
                usable=figures["bytes_touched"],
            )

    def _look_for_the_dead(self) -> None:
        for owner in [owner for owner, pid in self._resting.items() if not process_lives(pid)]:
            del self._resting[owner]
            self.core.died(owner)

    def _tick(self) -> None:
        self._look_for_the_dead()
        self.core.tick(self._clock())
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)

    def close(self) -> None:
        """Stop serving, remove socket and segments."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self.config.socket.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            connection.close("the node stops")
        self._stop_prefault.set()
        if self._prefaulter is not None:
            self._prefaulter.join()
        self.arena.close()

    # Clients

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("cannot accept a connection", reason=error.strerror)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # Nothing frees a descriptor in this very moment: look again later instead of spinning.
                    self.loop.remove_reader(self._listener)
                    self.loop.call_later(TICK_SECONDS, self._listen_again)
                return
            sock.setblocking(False)
            owner = self._next_owner
            self._next_owner += 1
            connection = _Connection(self, sock, owner)
            self._connections[owner] = connection
            self.loop.add_reader(sock, connection.on_readable)

    def _listen_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener, self._accept)

    def forget(self, owner: int, reason: str | None) -> None:
        """The connection of ``owner`` ended."""
        connection = self._connections.pop(owner)
        if reason is not None:
            self.refused_connections += 1
            _log.warning("connection ended", client=connection.client, pid=connection.pid, reason=reason)
        self.core.disconnect(owner, self._clock(), alive=process_lives(connection.pid))
        if self.core.rests(owner):
            self._resting[owner] = connection.pid
            self.loop.call_later(GRACE_SECONDS, self._look_for_the_dead)

    def welcome(self, version: int) -> protocol.Welcome:
        """The answer to a good greeting."""
        return protocol.Welcome(
            version, self.node_id.hex(), ems.__version__, self.config.autostarted, len(self.arena.sizes)
        )

    # Requests

    def answer(self, owner: int, request: protocol.Request) -> protocol.Answer | None:
        """Do what a greeted client asks; None for requests that have no answer.

        Raises:
            EmsError: it is refused, with the reason.
        """
        match request:
            case protocol.Lookup(namespace, _, lease, protocol.Tail() as tail):
                shared, held = self.core.lookup_tail(owner, namespace, tail, lease=lease)
                key = held.pages[0].key if held.pages else b""
                return protocol.Hits(shared, held.pending, held.lease, held.refs() if lease else b"", key)
            case protocol.Lookup(namespace, keys, lease):
                found = self.core.lookup(owner, namespace, split_keys(keys), lease=lease)
                refs = found.refs() if lease else b""
                return protocol.Hits(len(found.pages), found.pending, found.lease, refs)
            case protocol.Reserve():
                return self._reserve(owner, request)
            case protocol.Commit(reservation, positions):
                return self._commit(owner, reservation, positions)
            case protocol.Abort(reservation):
                self.core.abort(owner, reservation)
                return protocol.Done()
            case protocol.Release(lease):
                self.core.release(owner, lease)
                return None
            case protocol.Open(name, page_size):
                number = self.core.open_namespace(name, page_size)
                self._names[number] = name
                self._page_sizes[number] = page_size
                return protocol.Opened(number)
            case protocol.Attach(segment):
                if segment >= len(self.arena.sizes) or segment < 0:
                    raise ProtocolError(f"segment {segment} does not exist, expected 0 to {len(self.arena.sizes) - 1}")
                return protocol.SegmentAttached(segment, self.arena.sizes[segment])
            case protocol.Stats():
                return protocol.Figures(self.figures())
            case protocol.Hello():
                raise ProtocolError("a second Hello on one connection")

    def _reserve(self, owner: int, request: protocol.Reserve) -> protocol.Granted:
        keys = split_keys(request.keys)
        reserved = self.core.reserve(owner, request.namespace, request.parent, keys, request.tail)
        for assigned in reserved.assigned:
            namespace_id = hashlib.sha256(assigned.namespace.encode()).digest()[:16]
            self.arena.describe(assigned.segment, assigned.geometry, namespace_id)
        length = self._page_sizes.get(request.namespace, 0)
        for page in reserved.granted:
            self.arena.mark(page, SlotState.WRITING, length)
        refs = b"".join([page.ref for page in reserved.granted])
        return protocol.Granted(reserved.reservation, reserved.outcomes, refs)

    def _commit(self, owner: int, reservation: int, positions: list[int] | None) -> protocol.Done:
        namespace = self.core.namespace_of(owner, reservation)
        pages = self.core.commit(owner, reservation, positions)
        for page in pages:
            self.arena.mark(page, SlotState.PRESENT, self._page_sizes[namespace])
        return protocol.Done(len(pages))

    def figures(self) -> dict[str, object]:
        """What ``ems status`` and the metrics show."""
        return {
            "node": self.node_id.hex(),
            "release": ems.__version__,
            "pid": os.getpid(),
            "autostarted": self.config.autostarted,
            "uptime_seconds": round(self._clock() - self._started, 3),
            "clients": sum(connection.greeted for connection in self._connections.values()),
            "connections_refused": self.refused_connections,
            "directory": str(self.config.directory),
            **self.core.stats(),
        }
