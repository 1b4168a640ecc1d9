"""The pool node: the daemon of one host, a thin shell around :class:`ems.pool.core.PoolCore`.

It carries bytes between sockets and the brain, writes slot headers before the answer that lets a client see
them, touches memory in the background, and tells the brain who left.  One task reads all sockets, so the
brain needs no lock.  Whatever a client sends, the node lives: a bad message costs its connection only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

import ems
from ems.errors import ProtocolError, StaleReference
from ems.pool import protocol
from ems.pool.arena import Arena
from ems.pool.connection import Connection
from ems.pool.core import PoolCore, packed_refs, split_keys
from ems.pool.listener import Listener, refuse_if_taken
from ems.pool.processes import process_lives

if TYPE_CHECKING:
    from ems.config import NodeConfig

TICK_SECONDS = 1.0
GRACE_SECONDS = 0.02
"""A killed process closes its sockets a moment before it is gone; look again after this long."""

_log = structlog.get_logger("ems.node")


class Node:
    """A running node.  Made and used inside one event loop."""

    def __init__(self, config: NodeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self._clock = clock
        self.node_id = secrets.token_bytes(16)
        self._started = clock()
        refuse_if_taken(config.socket)
        self.arena = Arena(config, self.node_id)
        self.core = PoolCore(
            self.arena.sizes, high_watermark=config.high_watermark, eviction_ratio=config.eviction_ratio
        )
        self._page_sizes: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._next_owner = 1
        self._stop_prefault = threading.Event()
        self._prefaulter: threading.Thread | None = None
        self._resting: dict[int, int] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self._verbs: dict[type, Callable[[int, Any], protocol.Answer | None]] = {
            protocol.Lookup: self._lookup,
            protocol.Release: self._release,
            protocol.Reserve: self._reserve,
            protocol.Commit: self._commit,
            protocol.Abort: self._abort,
            protocol.Open: self._open,
            protocol.Attach: self._attach,
            protocol.Stats: self._stats,
            protocol.Changes: self._changes,
        }
        self.refused_connections = 0

    # Life

    def start(self) -> None:
        """Listen; from now on clients are served.

        Raises:
            ConfigError: the socket cannot be made.
        """
        self._listener = Listener(self.config.socket)
        self.loop.add_reader(self._listener.sock, self._accept)
        self._prefaulter = threading.Thread(target=self._prefault, name="ems-prefault", daemon=True)
        self._prefaulter.start()
        self._tick()

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
        now = self._clock()
        for connection in list(self._connections.values()):
            connection.check_greeting(now)
        self._look_for_the_dead()
        self.core.tick(now)
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)

    def close(self) -> None:
        """Stop serving, remove socket and segments."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.sock)
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close(None)
        self._stop_prefault.set()
        if self._prefaulter is not None:
            self._prefaulter.join()
        # A node that could not start has said why in its log, which its starter reads.
        self.arena.close(log=self.config.autostarted and self._listener is not None)

    # Clients

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("cannot accept a connection", reason=error.strerror)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # Nothing frees a descriptor in this very moment: look again later instead of spinning.
                    self.loop.remove_reader(self._listener.sock)
                    self.loop.call_later(TICK_SECONDS, self._listen_again)
                return
            sock.setblocking(False)
            owner = self._next_owner
            self._next_owner += 1
            connection = Connection(self, sock, owner, self._clock())
            self._connections[owner] = connection
            self.loop.add_reader(sock, connection.on_readable)

    def _listen_again(self) -> None:
        if self._listener is not None and self._listener.sock.fileno() >= 0:
            self.loop.add_reader(self._listener.sock, self._accept)

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
            version,
            self.node_id.hex(),
            ems.__version__,
            self.config.autostarted,
            len(self.arena.sizes),
            [protocol.TELLS_CHANGES],
        )

    # Requests

    def answer(self, owner: int, request: protocol.Request) -> protocol.Answer | None:
        """Do what a greeted client asks; None for requests that have no answer.

        Raises:
            EmsError: it is refused, with the reason.
        """
        return self._verbs[type(request)](owner, request)

    def descriptor(self, segment: int) -> int:
        """The open file of a segment."""
        return self.arena.descriptor(segment)

    def answered(self) -> None:
        """All that came in together has been answered: do what was put off."""
        self.core.settle()

    def _lookup(self, owner: int, request: protocol.Lookup) -> protocol.Hits:
        if request.tail is not None:
            shared, held = self.core.lookup_tail(owner, request.namespace, request.tail, lease=request.lease)
            key = held.pages[0].key if held.pages else b""
            return protocol.Hits(shared, held.pending, held.lease, held.refs() if request.lease else b"", key)
        found = self.core.lookup(owner, request.namespace, split_keys(request.keys), lease=request.lease)
        return protocol.Hits(len(found.pages), found.pending, found.lease, found.refs() if request.lease else b"")

    def _release(self, owner: int, request: protocol.Release) -> None:
        # Nobody waits for an answer, and one would be taken for that of the next request.
        with contextlib.suppress(StaleReference):
            self.core.release(owner, request.lease)

    def _abort(self, owner: int, request: protocol.Abort) -> protocol.Done:
        self.core.abort(owner, request.reservation)
        return protocol.Done()

    def _open(self, _: int, request: protocol.Open) -> protocol.Opened:
        if not request.page_size:
            return protocol.Opened(self.core.find_namespace(request.name))
        number = self.core.open_namespace(request.name, request.page_size)
        self._page_sizes[number] = request.page_size
        return protocol.Opened(number)

    def _attach(self, _: int, request: protocol.Attach) -> protocol.SegmentAttached:
        count = len(self.arena.sizes)
        if not 0 <= request.segment < count:
            raise ProtocolError(f"segment {request.segment} does not exist, expected 0 to {count - 1}")
        return protocol.SegmentAttached(request.segment, self.arena.sizes[request.segment])

    def _stats(self, _owner: int, _request: protocol.Stats) -> protocol.Figures:
        return protocol.Figures(self.figures())

    def _changes(self, _owner: int, request: protocol.Changes) -> protocol.Changed:
        return protocol.Changed(*self.core.changes.since(request.sequence, request.namespaces, self._clock()))

    def _reserve(self, owner: int, request: protocol.Reserve) -> protocol.Granted:
        keys = split_keys(request.keys)
        reserved = self.core.reserve(owner, request.namespace, request.parent, keys, request.tail)
        for assigned in reserved.assigned:
            namespace_id = hashlib.sha256(assigned.namespace.encode()).digest()[:16]
            self.arena.describe(assigned.segment, assigned.geometry, namespace_id)
        refs = packed_refs(reserved.granted)
        self.arena.begin_writing(reserved.granted, refs, self._page_sizes[request.namespace])
        return protocol.Granted(reserved.reservation, reserved.outcomes, refs)

    def _commit(self, owner: int, request: protocol.Commit) -> protocol.Done:
        pages = self.core.commit(owner, request.reservation, request.positions)
        self.arena.publish(packed_refs(pages))
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
