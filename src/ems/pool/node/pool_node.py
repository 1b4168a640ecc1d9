"""The pool node: the daemon of one host, a thin shell around :class:`ems.pool.core.pool_core.PoolCore`.

It carries bytes between sockets and the brain, writes slot headers before the answer that lets a client see
them, touches memory in the background, and tells the brain who left.  One task reads all sockets, so the
brain needs no lock.  Whatever a client sends, the node lives: a bad message costs its connection only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING

import structlog

from ems.errors import PoolRefused
from ems.histogram import Histogram
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.writing import Reserved
from ems.pool.layout import INSTANCE_BYTES, PageFlag, Writer, writer_of
from ems.pool.node.admin_runner import AdminRunner
from ems.pool.node.applier import Applier
from ems.pool.node.clients import Clients
from ems.pool.node.listener import Listener, refuse_if_taken
from ems.pool.node.memory import Memory
from ems.pool.node.restart import KeptOpen, Restart
from ems.pool.node.rounds import Rounds
from ems.pool.processes import may_write, writer_at
from ems.pool.protocol import messages
from ems.pool.segments.arena import Arena
from ems.pool.segments.folder import PINS_NAME
from ems.pool.segments.recovery import recover
from ems.pool.segments.side_file import Pins, SideFile
from ems.pool.service.handling import RequestHandler
from ems.pool.service.prompts import PromptFetcher
from ems.pool.service.storing import Steps, Storing
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.tenancy import Tenancy
from ems.pool.tiers.answers import Waking
from ems.pool.tiers.manager import TierManager
from ems.pool.tiers.opening import open_tier
from ems.pool.tiers.settings import parse_tier
from ems.version import __version__

if TYPE_CHECKING:
    from ems.config import NodeConfig
    from ems.pool.keys import Tail
    from ems.pool.tiers.seam import Tier
    from ems.pool.tiers.settings import TierConfig

TICK_SECONDS = 1.0

_log = structlog.get_logger("ems.node")


class Node:
    """A running node.  Made and used inside one event loop."""

    def __init__(
        self, config: NodeConfig, clock: Callable[[], float] = time.monotonic, kept: KeptOpen | None = None
    ) -> None:
        """``kept`` is what an earlier release in this process kept open."""
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.clock = clock
        self._kept = kept
        self._stays = False
        """Whether this process goes on as another release."""
        self.tenancy = Tenancy(config.tenants, config.directory, self._tenants_changed)
        self.node_id = secrets.token_bytes(16)
        self._started = clock()
        if kept is None:
            refuse_if_taken(config.socket)
        self.arena = self._new_arena()
        self.tenancy.read_owners()  # again: the arena may have dropped all segments, with what was known of them
        self.core = PoolCore(
            self.arena.sizes,
            high_watermark=config.high_watermark,
            eviction_ratio=config.eviction_ratio,
            policy=config.policy,
            changes=self.tenancy.changes,
            ids=self.tenancy.ids,
        )
        self.tenancy.first_quotas(self.core)
        self.core.draining = kept is not None and kept.draining
        self._pins = SideFile(config.directory / PINS_NAME, Pins)
        self.rounds = Rounds(self.loop, self.core)
        self.clients = Clients(self)
        self.memory = self._new_memory()
        self._own_process = writer_at(os.getpid(), bytes(INSTANCE_BYTES))
        self._ticker: asyncio.TimerHandle | None = None
        self.applier = Applier(self.core, self.arena, self.memory, self.tenancy, self._writer)
        self.storing = self._new_storing()
        self.tier_manager = self._new_tier_manager()
        self.admin = AdminRunner(self)
        self.handler = RequestHandler(self.core, self.storing, self.applier, self.tier_manager, self.clients)
        self.prompts = PromptFetcher(self.core, self.tier_manager)
        self.restart = Restart(self._held, self._refuse_restart)
        self._recover()

    # What a test kit puts itself in place of

    def may_write(self, writer: Writer) -> bool:
        return may_write(writer)

    def writer_at(self, client_id: int) -> Writer:
        connection = self.clients.connections[client_id]
        instance = connection.instance or writer_of(client_id).instance
        return writer_at(connection.pid, instance.ljust(INSTANCE_BYTES, b"\0"))

    def wall(self) -> float:
        return time.time()

    def _new_storing(self) -> Storing:
        return Storing(self.core, self.applier)

    def _new_memory(self) -> Memory:
        return Memory(self)

    def _new_tier_manager(self) -> TierManager:
        return TierManager(self, self._open_tiers(), self.clock)

    def _open_tiers(self) -> Sequence[tuple[TierConfig, Tier]]:
        try:
            tenants = self.config.tenants is not None
            return [(one, open_tier(one, for_tenants=tenants)) for one in map(parse_tier, self.config.tiers)]
        except BaseException:
            self.arena.close()
            raise

    def _recover(self) -> None:
        """Go on with what an earlier node left in the folder."""
        try:
            believable = filter(self.tenancy.believes, self.arena.images())
            recovered = self.tenancy.believed(recover(believable, *self.arena.limits))
            tails = self.arena.adopt(recovered)
        except BaseException:
            self.arena.close()
            raise
        for number, touched in enumerate(self.arena.touched):
            self.core.slots.touch(number, touched)
        self.core.adopt(recovered, tails, self.clock())
        for writer in self.core.deferred.writers:
            if writer.process == self._own_process.process:  # threads of the node that was this very process before
                self.core.deferred.stopped(writer)
        self.core.adopt_pins(self._pins.value)
        self._stay_small()
        # Last, of what was given up too: its tenants may still map it when it comes back.
        self.core.slots.know_tenants(self.tenancy.segment_tenants, self.arena.found)
        self.trusted_from = self.arena.headers.stamp
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

    def _held(self) -> bool:
        """Whether a client, not a tier, holds something, or is being served."""
        holders = [one.client_id for one in self.core.leases.all.values()]
        holders += [one.client_id for one in self.core.reservations.all.values()]
        return bool(self.rounds.turns) or max(holders, default=0) > 0

    def _refuse_restart(self) -> None:
        if self.admin.busy:
            raise PoolRefused("an administrator's work is under way on this node, upgrade it when that is done")

    def keep_open(self, http: socket.socket | None) -> KeptOpen:
        """What stays open for the release that this process becomes; call :meth:`close` next."""
        assert self.clients.listener is not None
        self._stays = True
        return KeptOpen(
            os.getpid(),
            os.dup(self.arena.lock),
            os.dup(self.clients.listener.sock.fileno()),
            None if http is None else os.dup(http.fileno()),
            str(self.config.directory),
            str(self.config.socket),
            sum(segment.size for segment in self.core.slots.segments),
            self.core.draining,
            max(segment.size for segment in self.core.slots.segments),
        )

    def keep_pins(self) -> None:
        try:
            self._pins.replace(self.core.pinned())
        except OSError as error:
            _log.warning("pins cannot be written down and end with this process", reason=error.strerror)

    # Life

    def start(self) -> None:
        """Listen; from now on clients are served.  Raises ConfigError: the socket cannot be made."""
        segments = self.core.slots.segments
        usable = [one.number for one in segments if one.size and one.number not in self.memory.lost]
        self.memory.touch_first(usable)
        descriptor = self._kept.listener if self._kept is not None else None
        self.clients.listen(Listener(self.config.socket, descriptor, mode=self.config.socket_mode))
        self.memory.touch_more(usable)
        self.tier_manager.start()
        self.tenancy.start()
        self._tick()

    def resized(self) -> None:
        """The pool has another size, on which the tenants' shares of it depend."""
        sizes = [segment.size for segment in self.core.slots.segments if segment.size]
        self.arena.keep_size(max(sizes), len(sizes))
        self.tenancy.apply_quotas(self.core)

    def _look_for_the_dead(self) -> None:
        living: dict[Hashable, bool] = {}
        for writer in self.core.deferred.writers:
            if writer.process not in living:
                living[writer.process] = self.may_write(writer)
            if not living[writer.process]:
                self.core.deferred.stopped(writer)

    def look_whether_dead(self, writer: Writer) -> None:
        """Free the slots of ``writer`` if its process has ended."""
        if self.core.deferred.awaits(writer) and not self.may_write(writer):
            self.core.deferred.stopped(writer)

    def _tick(self) -> None:
        # First: whatever goes wrong below, time goes on.
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)
        now = self.clock()
        for connection in list(self.clients.connections.values()):
            connection.check_deadlines(now)
        self.clients.end_unwelcome()
        self._look_for_the_dead()
        self.memory.look_after()
        self.memory.renew_lost()
        self.storing.tick(now)

    def close(self) -> None:
        """Stop serving and remove the socket; segments stay if there are pages in them.

        After :meth:`keep_open` socket, folder and segments stay as they are.
        """
        self.rounds.close()
        self.restart.close()
        self.admin.close()
        self.tenancy.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self.clients.close(stays=self._stays)
        self.tier_manager.close()
        self.memory.stop()
        self.memory.join()
        if self._stays:
            self.arena.leave()
            return
        # A node that could not start has said why in its log, which its starter reads.
        self.arena.close(keep=self.core.pages() > 0, log=self.config.autostarted and self.clients.listener is not None)

    def _tenants_changed(self, registry: Registry) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._obey, registry)

    def _obey(self, registry: Registry) -> None:
        self.tenancy.obey(registry, self.core)
        self.clients.end_unwelcome()
        _log.info("tenants read again", tenants=len(registry.tenants), revision=registry.revision)

    # Requests

    def answer(
        self, client_id: int, request: messages.Request
    ) -> messages.Answer | Steps[messages.Answer | None] | None:
        """Do what a greeted client asks, or begin it; None for requests that have no answer.

        Raises EmsError: it is refused, with the reason.
        """
        begin, seconds = self.clock(), self.handler.measured.seconds[type(request)]
        answer: messages.Answer | Steps[messages.Answer | None] | None = None
        try:
            answer = self.handler.handle(client_id, request, begin)
            if type(answer) is GeneratorType:
                try:
                    first = next(answer)
                except StopIteration as end:
                    answer = end.value
        finally:
            if type(answer) is not GeneratorType:
                seconds.observe(self.clock() - begin)
        return self._timed(first, answer, begin, seconds) if type(answer) is GeneratorType else answer

    def _timed(
        self, first: Waking | None, steps: Steps[messages.Answer | None], begin: float, seconds: Histogram
    ) -> Steps[messages.Answer | None]:
        """``steps`` after their ``first``, which was done."""
        try:
            if first is not None:
                yield first
            return (yield from steps)
        finally:
            seconds.observe(self.clock() - begin)

    def answered(self) -> None:
        """All that came in together has been answered: do what was put off."""
        self.core.settle_some()
        if self.core.slots.unclear:
            self.storing.clear()

    def promise(
        self, client_id: int, namespace: int, parent: bytes, keys: list[bytes], tails: Sequence[Tail | None] = ()
    ) -> Reserved:
        """Reserve pages and say in their headers that they are being written."""
        return self.storing.reserve(client_id, namespace, parent, keys, tails)

    def _writer(self, client_id: int) -> Writer:
        """Who writes for a client, as a node that comes after this one can know; tiers' threads are of this process."""
        if client_id > 0:
            return self.core.writer(client_id)
        return self._own_process._replace(instance=writer_of(client_id).instance)

    def publish(self, client_id: int, reservation: int, checksums: dict[int, int]) -> None:
        """Commit pages that came from a tier below memory: their checksums by position."""
        positions = sorted(checksums)
        sums = [checksums[position] for position in positions]
        self.storing.commit(client_id, reservation, positions, sums, PageFlag.FROM_BELOW)

    def own_figures(self) -> dict[str, object]:
        """Those that only say what node it is."""
        return {
            "node": self.node_id.hex(),
            "release": __version__,
            "pid": os.getpid(),
            "autostarted": self.config.autostarted,
            "uptime_seconds": round(self.clock() - self._started, 3),
        }

    def figures(self) -> dict[str, object]:
        return {
            **self.own_figures(),
            "restart": self.restart.figures(),
            "tenants": self.tenancy.figures(),
            "clients": sum(connection.greeted for connection in self.clients.connections.values()),
            "connections_refused": self.clients.refused,
            "directory": str(self.config.directory),
            **self.core.stats(),
            "tiers": self.tier_manager.figures(),
        }
