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
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

import ems
from ems.errors import ConfigError, PoolRefused, ProtocolError, StaleReference, Unauthorised, VersionMismatch
from ems.pool.administration.acts import Acts, List, Show
from ems.pool.core import handover
from ems.pool.core.answers import Committed, Reserved, packed_refs
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.room import Outcome
from ems.pool.core.soundness import faults
from ems.pool.node.audit import NAME as AUDIT_NAME
from ems.pool.node.audit import AuditLog
from ems.pool.node.connection import Connection
from ems.pool.node.experience_file import ExperienceKeeper
from ems.pool.node.listener import Listener, refuse_if_taken
from ems.pool.node.memory import Memory
from ems.pool.node.requests import Requests
from ems.pool.node.steward import Steward
from ems.pool.node.succession import Inheritance, give, plain_config
from ems.pool.processes import process_lives
from ems.pool.protocol import greeting, messages
from ems.pool.segments.arena import Arena, InheritedArena
from ems.pool.segments.guard import Guard
from ems.pool.segments.layout import FORMAT_VERSION, PageFlag
from ems.pool.segments.recovery import recover
from ems.pool.tenants.desk import TenantDesk
from ems.pool.tenants.gate import Guest, Peer, Pending, refusal
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.tenancy import Tenancy
from ems.pool.tiers.administered import AdministeredTiers
from ems.pool.tiers.carrier import Carrier
from ems.pool.tiers.opening import open_tier
from ems.pool.tiers.settings import parse_tier

if TYPE_CHECKING:
    from ems.config import NodeConfig
    from ems.pool.keys import Tail
    from ems.pool.tiers.seam import Tier
    from ems.pool.tiers.settings import TierConfig

TICK_SECONDS = 1.0
GRACE_SECONDS = 0.02
"""A killed process closes its sockets a moment before it is gone; look again after this long."""

_LOCK_AT, _LISTENER_AT, _OUTPUT_AT, _SEGMENTS_AT = 0, 1, 2, 4
"""Where descriptors stand among those that are handed over; the HTTP server's, if any, is before the segments'."""

_log = structlog.get_logger("ems.node")


class Node:
    """A running node.  Made and used inside one event loop."""

    def __init__(
        self,
        config: NodeConfig,
        clock: Callable[[], float] = time.monotonic,
        inheritance: Inheritance | None = None,
    ) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self._clock = clock
        self._inheritance = inheritance
        self.handed_over = asyncio.Event()
        """Set when another process is the node from now on; this one has nothing left."""
        self._tenancy = Tenancy(config.tenants, config.directory, self._tenants_changed)
        if inheritance is None:
            self.node_id = secrets.token_bytes(16)
            self._started = clock()
            refuse_if_taken(config.socket)
            self.arena = self._new_arena(None)
            self._tenancy.read_owners()  # again: the arena may have dropped all segments, with what was known of them
        else:
            self.node_id, self._started = inheritance.state.node_id, inheritance.state.started
            self.arena = self._inherited_arena(inheritance)
        self.core = PoolCore(
            self.arena.sizes,
            high_watermark=config.high_watermark,
            eviction_ratio=config.eviction_ratio,
            policy=config.policy,
            changes=self._tenancy.changes,
            ids=self._tenancy.ids,
        )
        self._tenancy.first_quotas(self.core)
        self._experience = ExperienceKeeper(config.directory, self.loop, self.core.policies)
        self._connections: dict[int, Connection] = {}
        self._guests: dict[int, Guest] = {}
        """Whom the connections of a node with tenants belong to; empty on an open node."""
        self._next_owner = 1
        self.memory = self._new_memory()
        self._resting: dict[int, int] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self._requests = Requests(self, clock)
        self.refused_connections = 0
        self._guard = Guard(self.core, self.arena)
        self.carrier = self._new_carrier()
        self._steward = Steward(self, clock)
        if config.tenants is not None:
            self._steward.audit = AuditLog(config.tenants.with_name(AUDIT_NAME))
        if self.carrier.levels:
            self._steward.use_tiers(AdministeredTiers(self.carrier))
        self._carried: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
            "tiers": (self.carrier.hand_over, self.carrier.go_on),
            "administration": (self._steward.snapshot, self._steward.resume),
            "tenants": (self._tenancy_snapshot, self._tenancy_resume),
        }
        """State of other rooms that goes along to another process: how it is taken, and how it is gone on from."""
        self.http_socket: socket.socket | None = None
        """The socket of the HTTP server beside this node, which a successor gets too."""
        if inheritance is None:
            self._recover()
        else:
            self._inherit(inheritance)

    # What a test kit puts itself in place of

    def _wall(self) -> float:
        return time.time()

    def _new_memory(self) -> Memory:
        return Memory(self, self._tenancy.renewed)

    def _new_carrier(self) -> Carrier:
        return Carrier(self, self._open_tiers(), self._clock)

    def _open_tiers(self) -> list[tuple[TierConfig, Tier]]:
        try:
            return [(one, open_tier(one)) for one in map(parse_tier, self.config.tiers)]
        except BaseException:
            # A successor that does not come to be leaves the folder to the process that goes on.
            (self.arena.close if self._inheritance is None else self.arena.leave)()
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
        learned = self.core.adopt(recovered, tails, self._clock(), self._experience.read())
        self._stay_small()
        # Last, of what was given up too: its tenants may still map it when it comes back.
        self.core.know_tenants(self._tenancy.owners, self.arena.found)
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
            log("pages are back", pages=pages, namespaces=namespaces, with_experience=learned, lost=recovered.lost)

    def _stay_small(self) -> None:
        """What an earlier node gave up stays without memory."""
        space = self.core.space
        for number in [number for number in self.arena.given_up if not space.segments[number].used]:
            space.unassign(number)
            space.close(number)
            space.give_up(number)
        if self.arena.given_up:
            self.resized()

    # Taking over from another process, and handing over to one

    def _inherited_arena(self, inheritance: Inheritance) -> Arena:
        state, given = inheritance.state, inheritance.descriptors
        first = _SEGMENTS_AT + state.http
        files = given[first : first + len(state.arena.sizes)]
        touched = [segment.touched for segment in state.core.segments]
        return self._new_arena(InheritedArena(state.arena, given[_LOCK_AT], files, touched))

    def _new_arena(self, inherited: InheritedArena | None) -> Arena:
        return Arena(self.config, self.node_id, inherited)

    def _inherit(self, inheritance: Inheritance) -> None:
        """Know all that the other process knew.

        Raises:
            ConfigError: it does not hold together.
        """
        state = inheritance.state
        broken = faults(state.core)
        if broken:
            raise ConfigError(f"cannot take over, what was handed over does not hold together: {broken[0]}")
        try:
            self.core.resume(state.core)
        except (ValueError, LookupError, StaleReference) as error:
            raise ConfigError(f"cannot take over, what was handed over does not hold together: {error}") from error
        self._trusted_from, self._next_owner = state.trusted_from, state.next_owner
        self.refused_connections, self._resting = state.refused_connections, dict(state.resting)
        for name, (_, resume) in self._carried.items():
            if name in state.extras:
                resume(state.extras[name])
        if state.http:
            self.http_socket = socket.socket(fileno=inheritance.descriptors[_SEGMENTS_AT])

    def _take_clients(self, inheritance: Inheritance) -> Listener:
        """Be the node from now on.

        Raises:
            PoolUnavailable: the other process goes on.
        """
        inheritance.accept()
        given, state = inheritance.descriptors, inheritance.state
        os.dup2(given[_OUTPUT_AT], 1)
        os.dup2(given[_OUTPUT_AT + 1], 2)
        self.arena.sign()
        clients = given[_SEGMENTS_AT + state.http + len(state.arena.sizes) :]
        for one, descriptor in zip(state.connections, clients, strict=True):
            sock = socket.socket(fileno=descriptor)
            sock.setblocking(False)
            connection = self._connections[one.owner] = Connection(self, sock, one.owner, self._clock())
            connection.resume(one)
        _log.info("took over", clients=len(clients), earlier_release=state.release)
        return Listener(self.config.socket, given[_LISTENER_AT])

    def _hand_over(self, owner: int, request: messages.TakeOver) -> None:
        """Another process wants to be the node.  Nothing else happens until it is, or is not."""
        successor = self._connections[owner]
        if successor.uid != os.geteuid():
            raise Unauthorised("only a process of the node's own user may take over from it")
        if not request.oldest <= handover.VERSION <= request.newest:
            raise VersionMismatch(
                f"release {request.release} takes over by versions {request.oldest} to {request.newest}, this node "
                f"(release {ems.__version__}) by {handover.VERSION}; stop it with 'ems stop', its pages stay"
            )
        if self._steward.busy:
            raise PoolRefused("an administrator's work is under way on this node, upgrade it when that is done")
        state, descriptors = self._handing(owner)
        reason = give(successor.sock, state, descriptors)
        if reason is not None:
            successor.sock.setblocking(False)
            _log.warning("the hand-over did not come about, this process goes on", reason=reason)
            raise ProtocolError(f"the hand-over did not come about: {reason}")
        _log.info("handed over", to=successor.pid, release=request.release)
        self._leave()

    def _handing(self, owner: int) -> tuple[handover.HandOver, list[int]]:
        """All of the node but the connection of ``owner``: its state and its descriptors."""
        assert self._listener is not None
        self.arena.headers.forget(self.core.freed())
        others = [connection for one, connection in self._connections.items() if one != owner]
        http = self.http_socket
        state = handover.HandOver(
            ems.__version__,
            FORMAT_VERSION,
            self.node_id,
            plain_config(self.config),
            self._started,
            self._trusted_from,
            self._next_owner,
            self.refused_connections,
            self._resting,
            http is not None,
            self.arena.snapshot(),
            self.core.snapshot(),
            [connection.snapshot() for connection in others],
            {name: take() for name, (take, _) in self._carried.items()},
        )
        descriptors = [self.arena.lock, self._listener.sock.fileno(), 1, 2]
        descriptors += [http.fileno()] if http is not None else []
        descriptors += [*self.arena.files, *(connection.sock.fileno() for connection in others)]
        return state, descriptors

    def _leave(self) -> None:
        """Another process is the node: let go of everything, and change nothing any more."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._steward.close()
        self.memory.stop()
        self._experience.leave()
        self.carrier.leave()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.sock)
            self._listener.leave()
        for connection in self._connections.values():
            connection.leave()
        self._connections.clear()
        self._guests.clear()
        self.handed_over.set()

    # Life

    def start(self) -> None:
        """Listen; from now on clients are served.

        Raises:
            ConfigError: the socket cannot be made.
        """
        segments = self.core.space.segments
        usable = [one.number for one in segments if one.size and one.number not in self.memory.lost]
        if self._inheritance is None:
            self.memory.touch_first(usable)
            self._listener = Listener(self.config.socket, mode=self.config.socket_mode)
        else:
            self._listener = self._take_clients(self._inheritance)
        self.loop.add_reader(self._listener.sock, self._accept)
        self.memory.touch_more(usable)
        self.carrier.start()
        self._tenancy.start()
        self._experience.start()
        self._tick()

    def resized(self) -> None:
        """The pool has another size, on which the tenants' shares of it depend."""
        try:
            self._tenancy.apply_quotas(self.core)
        except ConfigError as error:
            _log.error("the tenants' quotas do not fit in the pool any more", reason=str(error))

    def _look_after_segments(self) -> None:
        """Replace what clients spoilt; where memory is still being touched, once that is over."""
        for segment in self._guard.look():
            if self.core.space.settled(self.core.space.segments[segment]):
                self.core.renew(segment)
                self.memory.renew(segment)
            else:
                self.memory.lost.add(segment)
                self.core.lose(segment)

    def _look_for_the_dead(self) -> None:
        for owner in [owner for owner, pid in self._resting.items() if not process_lives(pid)]:
            del self._resting[owner]
            self.core.died(owner)

    def _tick(self) -> None:
        # First: whatever goes wrong below, time goes on.
        self._ticker = self.loop.call_later(TICK_SECONDS, self._tick)
        now = self._clock()
        for connection in list(self._connections.values()):
            connection.check_greeting(now)
        self._end_unwelcome()
        self._look_for_the_dead()
        self._look_after_segments()
        self.core.tick(now)
        self.memory.renew_lost()
        for segment in self.core.shrink():
            self.memory.renew(segment)
        self.arena.headers.forget(self.core.freed())

    def close(self) -> None:
        """Stop serving and remove the socket; segments stay if there are pages in them.

        What is, or still is, another process's stays as it is.
        """
        self._steward.close()
        self._tenancy.close()
        never_had = self._inheritance is not None and self._listener is None
        if self.handed_over.is_set() or never_had:
            self.carrier.leave()
            self.memory.join()
            self.arena.leave()
            return
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.sock)
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close(None)
        self.carrier.close()
        self.memory.stop()
        self.memory.join()
        # A node that could not start has said why in its log, which its starter reads.
        keep = self.core.pages() > 0
        if keep:
            self._experience.stop()
        self.arena.close(keep=keep, log=self.config.autostarted and self._listener is not None)

    # Clients

    def _accept(self) -> None:
        assert self._listener is not None
        while not self.handed_over.is_set():
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
        self._guests.pop(owner, None)
        if reason is not None:
            self.refused_connections += 1
            _log.warning("connection ended", client=connection.client, pid=connection.pid, reason=reason)
        self.core.disconnect(owner, self._clock(), alive=process_lives(connection.pid))
        if self.core.rests(owner):
            self._resting[owner] = connection.pid
            self.loop.call_later(GRACE_SECONDS, self._look_for_the_dead)

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer) -> Guest | Pending:
        """What becomes of a greeting that came as ``body``."""
        return self._tenancy.gate.greet(hello, body, peer, self._clock())

    def prove(self, pending: Pending, proof: bytes, peer: Peer) -> tuple[Guest, bytes]:
        """Who answered a challenge, and the node's own proof."""
        return self._tenancy.gate.prove(pending, proof, peer, self._clock(), self._wall())

    def welcome(self, owner: int, guest: Guest, version: int, signature: bytes) -> messages.Welcome:
        """The answer to a good greeting."""
        if not self._tenancy.gate.open:
            self._guests[owner] = guest
        return messages.Welcome(
            version,
            self.node_id.hex(),
            ems.__version__,
            self.config.autostarted,
            # A tenant has some of the segments only, and learns of them page by page.
            0 if guest.tenant else len(self.arena.sizes),
            [
                greeting.TELLS_CHANGES,
                greeting.TELLS_REASONS,
                greeting.KEEPS_CHECKSUMS,
                greeting.HANDS_OVER,
                greeting.TAKES_ANNOUNCEMENTS,
                greeting.DOES_ACTS,
                greeting.TELLS_TIERS,
                greeting.SERVES_TENANTS,
            ],
            self.config.verify,
            self._trusted_from,
            signature,
        )

    def known(self, owner: int) -> Guest:
        """Whom a connection that another process let in belongs to."""
        return self._guests.get(owner, Guest())

    def _tenancy_snapshot(self) -> dict[str, Any]:
        """Who the clients are, for a process that takes over; None of it on an open node."""
        guests = {owner: msgspec.structs.astuple(guest) for owner, guest in self._guests.items()}
        anybodys = [segment.number for segment in self.core.space.segments if segment.tenant == ""]
        lost = sorted(self.memory.lost)
        return {"guests": guests, "lost": lost, "anybodys": anybodys, **self._tenancy.snapshot()}

    def _tenancy_resume(self, state: dict[str, Any]) -> None:
        self._guests.update({owner: Guest(*guest) for owner, guest in state["guests"].items()})
        for segment in state["lost"]:
            self.memory.lost.add(segment)
            self.core.lose(segment)
        self._tenancy.resume(state)
        self.core.know_tenants(self._tenancy.owners, state.get("anybodys", ()))

    def _tenants_changed(self, registry: Registry) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._obey, registry)

    def _obey(self, registry: Registry) -> None:
        try:
            self._tenancy.obey(registry, self.core)
        except ConfigError as error:
            _log.error("the tenants' quotas cannot be kept, those before still count", reason=str(error))
        self._end_unwelcome()
        _log.info("tenants read again", tenants=len(registry.tenants), revision=registry.revision)

    def _end_unwelcome(self) -> None:
        """End the connections of keys that were revoked or are over."""
        wall = self._wall()
        for owner in [owner for owner, guest in self._guests.items() if not self._tenancy.gate.admits(guest, wall)]:
            self._connections[owner].refuse(refusal())

    # Requests

    def answer(self, owner: int, request: messages.Request) -> messages.Answer | None:
        """Do what a greeted client asks; None for requests that have no answer.

        Raises:
            EmsError: it is refused, with the reason.
        """
        guest = self._guests.get(owner)
        if guest is None:
            return self._ask(owner, request)
        return self._answer_guest(owner, guest, request)

    def _answer_guest(self, owner: int, guest: Guest, request: messages.Request) -> messages.Answer | None:
        """Do what is asked on a node with tenants."""
        desk = self._tenancy.desk(guest, request)
        if desk is None:
            return self._ask(owner, request)
        inner = desk.inward(request)
        if isinstance(inner, messages.Stats):
            return messages.Figures(self._own_figures(desk))
        if isinstance(inner, messages.Open) and inner.page_size and self.core.find_namespace(inner.name) < 0:
            desk.opens()
        if isinstance(inner, messages.Attach) and self.core.segment_tenant(inner.segment) != guest.tenant:
            raise StaleReference(f"segment {inner.segment} holds no page of this tenant, look again")
        answer = self._ask(owner, inner)
        desk.tally.count(request, answer)
        return desk.outward(answer)

    def _ask(self, owner: int, request: messages.Request) -> messages.Answer | None:
        if isinstance(request, messages.TakeOver):
            self._hand_over(owner, request)
            return None
        if isinstance(request, messages.Taken):
            raise ProtocolError("Taken came without a hand-over")
        return self._requests.answer(owner, request)

    def _own_figures(self, desk: TenantDesk) -> dict[str, object]:
        """What a tenant is shown: its own."""
        figures = self._node_figures()
        return {**figures, **desk.figures(self.core.rows(desk.numbers))}

    def opened(self, segment: int) -> int:
        """A descriptor of a segment's file that is passed to a client, and closed then."""
        return self.arena.opened(segment)

    def answered(self) -> None:
        """All that came in together has been answered: do what was put off."""
        self.core.settle()
        self.arena.headers.forget(self.core.freed())

    def promise(
        self, owner: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Reserve pages and say in their headers that they are being written."""
        reserved = self.core.reserve(owner, namespace, parent, keys, tail)
        # In this order: a slot may have been freed, and carved or granted, by this very request.
        self.arena.headers.forget(self.core.freed())
        unnoted: list[int] = []
        for assigned in reserved.assigned:
            if assigned.renewed:
                self.memory.renew(assigned.segment)
            else:
                try:
                    self._tenancy.assigned(assigned.segment, assigned.namespace)
                except OSError as error:
                    _log.error("cannot note whose a segment is", segment=assigned.segment, reason=error.strerror)
                    unnoted.append(assigned.segment)
                    continue
            if assigned.segment not in self.memory.lost:
                self.arena.headers.describe(assigned)
        if unnoted:
            return self._refuse(owner, reserved, unnoted)
        self.arena.headers.begin_writing(reserved.granted, packed_refs(reserved.granted), reserved.page_size)
        return reserved

    def _refuse(self, owner: int, reserved: Reserved, unnoted: list[int]) -> Reserved:
        """Take back what was granted: it would lie in segments of which nobody would know whose they are."""
        if reserved.granted:
            self.core.abort(owner, reserved.reservation)
        for segment in unnoted:
            self.core.space.unassign(segment)
        none = bytes(Outcome.NO_SPACE if one == Outcome.GRANTED else one for one in reserved.outcomes)
        return Reserved(0, none, [], [], reserved.page_size)

    def publish(self, owner: int, reservation: int, checksums: dict[int, int]) -> None:
        """Commit pages that came from a tier below memory: their checksums by position."""
        done = self.core.commit(owner, reservation, sorted(checksums))
        self.published(done, [checksums[position] for position in done.positions], PageFlag.FROM_BELOW)

    def published(self, done: Committed, checksums: list[int] | None, flags: PageFlag) -> None:
        """Say in the headers of committed pages that they are whole."""
        self.arena.headers.publish(done.pages, done.page_size, checksums, flags)
        for page in done.pages:
            if page.tail is not None:
                self.arena.keep_tail(done.namespace, page, self.core.tails)

    @property
    def open(self) -> bool:
        """Whether the node has no tenants."""
        return self._tenancy.gate.open

    def features(self, owner: int) -> Container[str]:
        """What the client ``owner`` understands of what nodes tell."""
        return self._connections[owner].features

    def administer(self, owner: int, act: Acts, *, dry_run: bool) -> dict[str, Any]:
        """Do what the administrator ``owner`` asks for."""
        return self._steward.do(self._connections[owner].peer, act, dry_run=dry_run)

    def touch_more(self, segments: list[int]) -> None:
        """Touch ``segments`` in the background, after those that came before."""
        self.memory.touch_more(segments)

    def _node_figures(self) -> dict[str, object]:
        return {
            "node": self.node_id.hex(),
            "release": ems.__version__,
            "pid": os.getpid(),
            "autostarted": self.config.autostarted,
            "uptime_seconds": round(self._clock() - self._started, 3),
        }

    def look(self, act: List | Show) -> dict[str, Any]:
        """The report of an act that changes nothing, for the HTTP server."""
        return self._steward.look(act)

    def figures(self) -> dict[str, object]:
        """What ``ems status`` and the metrics show."""
        return {
            **self._node_figures(),
            "tenants": self._tenancy.figures(),
            "clients": sum(connection.greeted for connection in self._connections.values()),
            "connections_refused": self.refused_connections,
            "directory": str(self.config.directory),
            **self.core.stats(),
            "tiers": self.carrier.figures(),
        }
