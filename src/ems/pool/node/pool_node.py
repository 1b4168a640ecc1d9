"""The pool node: the daemon of one host, a thin shell around :class:`ems.pool.core.pool_core.PoolCore`.

It carries bytes between sockets and the brain, writes slot headers before the answer that lets a client see
them, touches memory in the background, and tells the brain who left.  One task reads all sockets, so the
brain needs no lock.  Whatever a client sends, the node lives: a bad message costs its connection only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import structlog

from ems.errors import PoolRefused
from ems.histogram import Histogram
from ems.pool.core.answers import Reserved
from ems.pool.core.pool_core import PoolCore
from ems.pool.layout import PageFlag
from ems.pool.node.admin_runner import AdminRunner
from ems.pool.node.applier import Applier, Steps
from ems.pool.node.audit import NAME as AUDIT_NAME
from ems.pool.node.audit import AuditLog
from ems.pool.node.client_limits import ClientLimits, room_for_clients, too_many_greetings, too_much_kept
from ems.pool.node.connection import Connection
from ems.pool.node.listener import Listener, refuse_if_taken
from ems.pool.node.memory import Memory
from ems.pool.node.restart import KeptOpen, Restart
from ems.pool.node.segment_watcher import SegmentWatcher
from ems.pool.node.turns import Farewell, Turns, Worker
from ems.pool.processes import may_write, writer_at
from ems.pool.protocol import greeting, messages
from ems.pool.protocol.acts import List, Show
from ems.pool.segments.arena import Arena
from ems.pool.segments.folder import PINS_NAME
from ems.pool.segments.recovery import recover
from ems.pool.segments.side_file import Pins, SideFile
from ems.pool.service.effects import Administer, Effect, ShowFigures
from ems.pool.service.handling import RequestHandler
from ems.pool.service.measured import Measured
from ems.pool.service.storing import Storing
from ems.pool.tenants.gate import Peer, Pending, Principal, refusal
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.request_filter import TenantRequestFilter
from ems.pool.tenants.tenancy import Tenancy
from ems.pool.tiers.manager import TierManager
from ems.pool.tiers.opening import open_tier
from ems.pool.tiers.settings import parse_tier
from ems.pool.writer import INSTANCE_BYTES, Writer, writer_of
from ems.version import __version__

if TYPE_CHECKING:
    from ems.config import NodeConfig
    from ems.pool.keys import Tail
    from ems.pool.tiers.seam import Tier
    from ems.pool.tiers.settings import TierConfig

TICK_SECONDS = 1.0
ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before those are heard that came before: they may be about to greet."""
AT_ONCE = 4096
"""Work (in keys) that is done when it comes, without a look at who else wants something, before turns are taken."""
ROUND = 1024
"""Work that is done in one round of the loop."""
GRACE_SECONDS = 0.02
"""A killed process closes its sockets a moment before it is gone; look again after this long."""

_log = structlog.get_logger("ems.node")


class Node:
    """A running node.  Made and used inside one event loop."""

    def __init__(
        self,
        config: NodeConfig,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptOpen | None = None,
    ) -> None:
        """``kept`` is what an earlier release in this process kept open."""
        self.config = config
        self.loop = asyncio.get_running_loop()
        self._clock = clock
        self._kept = kept
        self._stays = False
        """Whether this process goes on as another release."""
        self._closed = False
        self._tenancy = Tenancy(config.tenants, config.directory, self._tenants_changed)
        self.node_id = secrets.token_bytes(16)
        self._started = clock()
        if kept is None:
            refuse_if_taken(config.socket)
        self.arena = self._new_arena()
        self._tenancy.read_owners()  # again: the arena may have dropped all segments, with what was known of them
        self.core = PoolCore(
            self.arena.sizes,
            high_watermark=config.high_watermark,
            eviction_ratio=config.eviction_ratio,
            policy=config.policy,
            changes=self._tenancy.changes,
            ids=self._tenancy.ids,
        )
        self._tenancy.first_quotas(self.core)
        self.core.draining = kept is not None and kept.draining
        self._pins = SideFile(config.directory / PINS_NAME, Pins)
        self._connections: dict[int, Connection] = {}
        self._principals: dict[int, Principal] = {}
        """Whom the connections of a node with tenants belong to; empty on an open node."""
        self._limits = ClientLimits()
        self._turns = Turns()
        self._at_once = AT_ONCE
        """Work that may be done in the moment in which it comes, until all have had their turns."""
        self._taking_turns = False
        self._next_client_id = 1
        self.memory = self._new_memory()
        self._own_process = writer_at(os.getpid(), bytes(INSTANCE_BYTES))
        self._ticker: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self.storing = self._new_storing()
        self.refused_connections = 0
        self._segment_watcher = SegmentWatcher(self.core, self.arena)
        self.tier_manager = self._new_tier_manager()
        self._admin = AdminRunner(self, clock)
        if config.tenants is not None:
            self._admin.audit = AuditLog(config.tenants.with_name(AUDIT_NAME))
        if self.tier_manager.states:
            self._admin.use_tiers(self.tier_manager)
        self.handler = RequestHandler(self.core, self.storing, self.tier_manager, self)
        does: dict[type[Effect], Callable[[Any], Any]] = {Administer: self._administer, ShowFigures: self._show_figures}
        self.applier = Applier(self.core, self.arena, self.memory, self._tenancy, self._writer, does)
        self.restart = Restart(lambda: bool(self._turns) or self.core.held_by_clients(), self._hindered)
        self._recover()

    # What a test kit puts itself in place of

    def _may_write(self, writer: Writer) -> bool:
        return may_write(writer)

    def _writer_at(self, client_id: int) -> Writer:
        connection = self._connections[client_id]
        instance = connection.instance or writer_of(client_id).instance
        return writer_at(connection.pid, instance.ljust(INSTANCE_BYTES, b"\0"))

    def _wall(self) -> float:
        return time.time()

    def _new_storing(self) -> Storing:
        return Storing(self.core)

    def _new_memory(self) -> Memory:
        return Memory(self, self._tenancy.renewed)

    def _new_tier_manager(self) -> TierManager:
        return TierManager(self, self._open_tiers(), self._clock)

    def _open_tiers(self) -> list[tuple[TierConfig, Tier]]:
        try:
            return [(one, open_tier(one)) for one in map(parse_tier, self.config.tiers)]
        except BaseException:
            self.arena.close()
            raise

    def _recover(self) -> None:
        """Go on with what an earlier node left in the folder."""
        try:
            believable = filter(self._tenancy.believes, self.arena.images())
            recovered = self._tenancy.believed(recover(believable, *self.arena.limits))
            tails = self.arena.adopt(recovered)
        except BaseException:
            self.arena.close()
            raise
        for number, touched in enumerate(self.arena.touched):
            self.core.touched(number, touched)
        self.core.adopt(recovered, tails, self._clock())
        for writer in self.core.awaited_writers:
            if writer.process == self._own_process.process:  # threads of the node that was this very process before
                self.core.stopped(writer)
        self.core.adopt_pins(self._pins.value)
        self._stay_small()
        # Last, of what was given up too: its tenants may still map it when it comes back.
        self.core.know_tenants(self._tenancy.segment_tenants, self.arena.found)
        self._trusted_from = self.arena.headers.stamp
        for note in self.arena.notes:
            _log.warning(note)
        reasons = Counter(one.reason for one in recovered.unreadable)
        for reason, segments in reasons.items():
            _log.warning("segments cannot be read and begin anew", segments=segments, reason=reason)
        if recovered.segments:
            pages = sum(len(namespace.pages) for namespace in recovered.namespaces)
            log = _log.warning if recovered.lost else _log.info
            namespaces = len(recovered.namespaces)
            log("pages are back", pages=pages, namespaces=namespaces, lost=recovered.lost)

    def _stay_small(self) -> None:
        """What an earlier node gave up stays without memory."""
        slots = self.core.slots
        for number in [number for number in self.arena.given_up if not slots.segments[number].used]:
            slots.unassign(number)
            slots.close(number)
            slots.give_up(number)
        if self.arena.given_up:
            self.resized()

    # Becoming another release

    def _new_arena(self) -> Arena:
        return Arena(self.config, self.node_id, self._kept.lock if self._kept is not None else None)

    def _hindered(self) -> str:
        if self._admin.busy:
            return "an administrator's work is under way on this node, upgrade it when that is done"
        return ""

    def keep_open(self, http: socket.socket | None) -> KeptOpen:
        """What stays open for the release that this process becomes; call :meth:`close` next."""
        assert self._listener is not None
        self._stays = True
        return KeptOpen(
            os.getpid(),
            os.dup(self.arena.lock),
            os.dup(self._listener.sock.fileno()),
            None if http is None else os.dup(http.fileno()),
            str(self.config.directory),
            str(self.config.socket),
            sum(segment.size for segment in self.core.slots.segments),
            self.core.draining,
            max(segment.size for segment in self.core.slots.segments),
        )

    def keep_pins(self) -> None:
        """Write down what is pinned, for the next start."""
        try:
            self._pins.replace(self.core.pinned())
        except OSError as error:
            _log.warning("pins cannot be written down and end with this process", reason=error.strerror)

    # Life

    def start(self) -> None:
        """Listen; from now on clients are served.

        Raises:
            ConfigError: the socket cannot be made.
        """
        segments = self.core.slots.segments
        usable = [one.number for one in segments if one.size and one.number not in self.memory.lost]
        self.memory.touch_first(usable)
        descriptor = self._kept.listener if self._kept is not None else None
        self._listener = Listener(self.config.socket, descriptor, mode=self.config.socket_mode)
        self.loop.add_reader(self._listener.sock, self._accept)
        self.memory.touch_more(usable)
        self.tier_manager.start()
        self._tenancy.start()
        self._tick()

    def resized(self) -> None:
        """The pool has another size, on which the tenants' shares of it depend."""
        sizes = [segment.size for segment in self.core.slots.segments if segment.size]
        self.arena.keep_size(max(sizes), len(sizes))
        self._tenancy.apply_quotas(self.core)

    def _look_after_segments(self) -> None:
        """Replace what clients spoilt; where memory is still being touched, once that is over."""
        for segment in self._segment_watcher.look():
            if self.core.slots.settled(self.core.slots.segments[segment]):
                self.applier.finish(self.storing.spoilt(segment))
            else:
                self.memory.lost.add(segment)
                self.core.lose(segment)

    def _look_for_the_dead(self) -> None:
        living: dict[Hashable, bool] = {}
        for writer in self.core.awaited_writers:
            if writer.process not in living:
                living[writer.process] = self._may_write(writer)
            if not living[writer.process]:
                self.core.stopped(writer)

    def _look_whether_dead(self, writer: Writer) -> None:
        if self.core.awaits(writer) and not self._may_write(writer):
            self.core.stopped(writer)

    def _tick(self) -> None:
        # First: whatever goes wrong below, time goes on.
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)
        now = self._clock()
        for connection in list(self._connections.values()):
            connection.check_deadlines(now)
        self._end_unwelcome()
        self._look_for_the_dead()
        self._look_after_segments()
        self.memory.renew_lost()
        self.applier.finish(self.storing.tick(now))

    def close(self) -> None:
        """Stop serving and remove the socket; segments stay if there are pages in them.

        After :meth:`keep_open` socket, folder and segments stay as they are.
        """
        self._closed = True
        self.restart.close()
        self._admin.close()
        self._tenancy.close()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.sock)
            (self._listener.leave if self._stays else self._listener.close)()
        for connection in list(self._connections.values()):
            connection.close(None)
        self.tier_manager.close()
        self.memory.stop()
        self.memory.join()
        if self._stays:
            self.arena.leave()
            return
        # A node that could not start has said why in its log, which its starter reads.
        self.arena.close(keep=self.core.pages() > 0, log=self.config.autostarted and self._listener is not None)

    # Clients

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTED_AT_ONCE):
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
            self.take_in(sock)

    def take_in(self, sock: socket.socket) -> Connection:
        """Serve who connected."""
        sock.setblocking(False)
        client_id = self._next_client_id
        self._next_client_id += 1
        connection = self._connections[client_id] = Connection(self, sock, client_id, self._clock())
        self.loop.add_reader(sock, connection.on_readable)
        gives_way = self._limits.came(client_id, connection.party, self._room())
        if gives_way is not None:
            self._connections[gives_way].refuse(PoolRefused(too_many_greetings(greeting.GREETING_SECONDS)))
        return connection

    def _room(self) -> int:
        """How many connections there may be."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        threads = sum(level.config.readers + level.most_writers for level in self.tier_manager.states)
        return room_for_clients(descriptors, len(self.arena.sizes), threads)

    def keeps(self, client_id: int, size: int) -> None:
        """So many bytes are kept for the client ``client_id`` from now on; ends whoever has too many."""
        ends = self._limits.keeps(client_id, size)
        if ends is not None:
            self._connections[ends[0]].refuse(PoolRefused(too_much_kept(ends[1])))

    def now(self) -> float:
        """The time."""
        return self._clock()

    def _listen_again(self) -> None:
        if self._listener is not None and self._listener.sock.fileno() >= 0:
            self.loop.add_reader(self._listener.sock, self._accept)

    def forget(self, client_id: int, reason: str | None) -> None:
        """The connection of ``client_id`` ended."""
        connection = self._connections.pop(client_id)
        self._principals.pop(client_id, None)
        self._limits.gone(client_id)
        if reason is not None:
            self.refused_connections += 1
            _log.warning("connection ended", client=connection.client, pid=connection.pid, reason=reason)
        self._turns.drop(connection)
        farewell = Farewell(connection.party, self._farewell(client_id))
        farewell.turn()
        if farewell.busy:
            self._turns.add(farewell)
            self._take_turns_soon()

    def _farewell(self, client_id: int) -> Iterator[int]:
        """Take back what the client ``client_id`` held."""
        writer = self.core.writer(client_id)
        for work in self.core.leave(client_id, self._clock(), alive=self._may_write(writer)):
            self.answered()
            yield work
        if self.core.awaits(writer):
            self.loop.call_later(GRACE_SECONDS, self._look_whether_dead, writer)

    # Turns

    def has_work(self, connection: Connection) -> None:
        """Have what came on ``connection`` done, at once where nobody else waits."""
        if self._taking_turns or self._at_once <= 0:
            self._turns.add(connection)
            self._take_turns_soon()
            return
        self._at_once -= connection.turn()
        if connection.busy:
            self._turns.add(connection)
            self._take_turns_soon()
        elif self.core.unsettled:
            self._take_turns_soon()

    def _turn(self) -> int:
        worker: Worker | None = self._turns.next()
        if worker is None:
            return ROUND
        work = worker.turn()
        if worker.busy:
            self._turns.add(worker)
        return work

    def _take_turns_soon(self) -> None:
        if not self._taking_turns:
            self._taking_turns = True
            self.loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """Go round, and let the loop see between rounds who else wants something."""
        self._taking_turns = False
        if self._closed:
            return
        left = ROUND
        while left > 0 and self._turns:
            left -= self._turn()
        self.core.settle_some()
        if self._turns or self.core.unsettled:
            self._take_turns_soon()
        else:
            self._at_once = AT_ONCE

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer) -> Principal | Pending:
        """What becomes of a greeting that came as ``body``."""
        return self._tenancy.gate.greet(hello, body, peer, self._clock())

    def prove(self, pending: Pending, proof: bytes, peer: Peer) -> tuple[Principal, bytes]:
        """Who answered a challenge, and the node's own proof."""
        return self._tenancy.gate.prove(pending, proof, peer, self._clock(), self._wall())

    def welcome(self, client_id: int, principal: Principal, version: int, signature: bytes) -> messages.Welcome:
        """The answer to a good greeting.

        Raises:
            PoolRefused: there are too many connections.
        """
        party = self._party(client_id, principal)
        self._limits.greeted(client_id, party, self._room())
        self._connections[client_id].party = party
        self.core.introduce(client_id, self._writer_at(client_id))
        if not self._tenancy.gate.open:
            self._principals[client_id] = principal
        return messages.Welcome(
            version,
            self.node_id.hex(),
            __version__,
            self.config.autostarted,
            # A tenant has some of the segments only, and learns of them page by page.
            0 if principal.tenant else len(self.arena.sizes),
            [
                greeting.TELLS_CHANGES,
                greeting.TELLS_REASONS,
                greeting.KEEPS_CHECKSUMS,
                greeting.RESTARTS,
                greeting.TAKES_ANNOUNCEMENTS,
                greeting.DOES_ACTS,
                greeting.TELLS_TIERS,
                greeting.SERVES_TENANTS,
                greeting.AWAITS_WRITERS,
            ],
            self.config.verify,
            self._trusted_from,
            signature,
        )

    def _party(self, client_id: int, principal: Principal) -> str:
        """Whose a connection is, with whom it shares what all have."""
        connection = self._connections[client_id]
        if principal.tenant:
            return f"tenant {principal.tenant}"
        looks_after = principal.administers and greeting.ADMINISTERS in connection.features
        return "administrators" if looks_after else f"user {connection.uid}"

    def _tenants_changed(self, registry: Registry) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._obey, registry)

    def _obey(self, registry: Registry) -> None:
        self._tenancy.obey(registry, self.core)
        self._end_unwelcome()
        _log.info("tenants read again", tenants=len(registry.tenants), revision=registry.revision)

    def _end_unwelcome(self) -> None:
        """End the connections of keys that were revoked or are over."""
        wall = self._wall()
        for client_id in [
            client_id
            for client_id, principal in self._principals.items()
            if not self._tenancy.gate.admits(principal, wall)
        ]:
            self._connections[client_id].refuse(refusal())

    # Requests

    def answer(
        self, client_id: int, request: messages.Request
    ) -> messages.Answer | Steps[messages.Answer | None] | None:
        """Do what a greeted client asks, or begin it; None for requests that have no answer.

        Raises:
            EmsError: it is refused, with the reason.
        """
        begin, seconds = self._clock(), self.handler.measured.seconds[type(request)]
        answer: messages.Answer | Steps[messages.Answer | None] | None = None
        try:
            work = self.handler.handle(client_id, request, begin)
            answer = work if work is None or isinstance(work, messages.Message) else self.applier.begin(work)
        finally:
            if type(answer) is not GeneratorType:
                seconds.observe(self._clock() - begin)
        return self._timed(answer, begin, seconds) if type(answer) is GeneratorType else answer

    def _timed(
        self, steps: Steps[messages.Answer | None], begin: float, seconds: Histogram
    ) -> Steps[messages.Answer | None]:
        try:
            return (yield from steps)
        finally:
            seconds.observe(self._clock() - begin)

    def request_filter(self, client_id: int, request: messages.Request) -> TenantRequestFilter | None:
        """Where a tenant's client is served; None for anybody on an open node, and for an administrator.

        Raises:
            PoolRefused: an administrator asked for what is the tenants' business.
        """
        principal = self._principals.get(client_id)
        return None if principal is None else self._tenancy.request_filter(principal, request)

    def opened(self, segment: int) -> int:
        """A descriptor of a segment's file that is passed to a client, and closed then."""
        return self.arena.opened(segment)

    def answered(self) -> None:
        """All that came in together has been answered: do what was put off."""
        self.applier.finish(self.storing.settle())

    def promise(
        self, client_id: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Reserve pages and say in their headers that they are being written."""
        return self.applier.finish(self.storing.reserve(client_id, namespace, parent, keys, tail))

    def _writer(self, client_id: int) -> Writer:
        """Who writes for a client, as a node that comes after this one can know; tiers' threads are of this process."""
        if client_id > 0:
            return self.core.writer(client_id)
        return self._own_process._replace(instance=writer_of(client_id).instance)

    def publish(self, client_id: int, reservation: int, checksums: dict[int, int]) -> None:
        """Commit pages that came from a tier below memory: their checksums by position."""
        work = self.storing.commit(client_id, reservation, sorted(checksums), checksums, PageFlag.FROM_BELOW)
        self.applier.finish(work)

    @property
    def open(self) -> bool:
        """Whether the node has no tenants."""
        return self._tenancy.gate.open

    @property
    def restarting(self) -> bool:
        """Whether nothing new is begun, because the node is about to restart."""
        return self.restart.waits

    def features(self, client_id: int) -> Container[str]:
        """What the client ``client_id`` understands of what nodes tell."""
        return self._connections[client_id].features

    def who(self, client_id: int) -> dict[str, object]:
        """What is known of the owner of a lease: its process, what it calls itself, its tenant."""
        connection = self._connections.get(client_id)
        if connection is None:
            return {"client": "the tiers below memory" if client_id < 0 else "gone", "pid": os.getpid(), "tenant": ""}
        tenant = self._principals[client_id].tenant if client_id in self._principals else ""
        return {"client": connection.client, "pid": connection.pid, "tenant": tenant}

    def _administer(self, effect: Administer) -> dict[str, Any]:
        return self._admin.do(self._connections[effect.client_id].peer, effect.act, dry_run=effect.dry_run)

    def _show_figures(self, effect: ShowFigures) -> dict[str, object]:
        return self._node_figures() if effect.own else self.figures()

    def touch_more(self, segments: list[int]) -> None:
        """Touch ``segments`` in the background, after those that came before."""
        self.memory.touch_more(segments)

    def _node_figures(self) -> dict[str, object]:
        return {
            "node": self.node_id.hex(),
            "release": __version__,
            "pid": os.getpid(),
            "autostarted": self.config.autostarted,
            "uptime_seconds": round(self._clock() - self._started, 3),
        }

    def look(self, act: List | Show) -> dict[str, Any]:
        """The report of an act that changes nothing, for the HTTP server."""
        return self._admin.look(act)

    @property
    def measured(self) -> Measured:
        """How long requests took and what they moved, for the metrics."""
        return self.handler.measured

    def figures(self) -> dict[str, object]:
        """What ``ems status`` and the metrics show."""
        return {
            **self._node_figures(),
            "restart": self.restart.figures(),
            "tenants": self._tenancy.figures(),
            "clients": sum(connection.greeted for connection in self._connections.values()),
            "connections_refused": self.refused_connections,
            "directory": str(self.config.directory),
            **self.core.stats(),
            "tiers": self.tier_manager.figures(),
        }
