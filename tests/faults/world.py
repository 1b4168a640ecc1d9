"""A node on real files with its tiers and its clients, and the plain account against which all of them are checked.

The account knows which bytes belong to which key, which pages were committed, and which places were damaged on purpose.
What it demands stands in :mod:`tests.faults.invariants`; how nodes come and go in :mod:`tests.faults.lifecycle`.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ems.config import NodeConfig
from ems.pool.layout import HEADERS_OFFSET, INSTANCE_BYTES, PageRef, Writer, unpack_description
from tests.faults import grants, tenants
from tests.faults.below import Below
from tests.faults.node import HistoryNode
from tests.faults.points import Crash, Points
from tests.faults.settings import (
    SEATS,
    SEGMENT,
    SEGMENTS,
    TENANTS,
    Known,
    Settings,
    Slot,
    SlotLocation,
    Violation,
    content,
    size_of,
)
from tests.faults.simulated_clients import GONE, Identity, Late, SimulatedClient
from tests.faults.times import Times, Turns
from tests.pool.segment_memory import map_segment, page_memory

if TYPE_CHECKING:
    from ems.pool.core.writing import Reserved
    from ems.pool.keys import Tail
    from ems.pool.node.connection import Connection
    from ems.pool.pages import Page

MEMORY = Path("/dev/shm")


class World:
    """Everything that a history acts on.  ``node`` is there once :func:`~tests.faults.lifecycle.begin` was called."""

    node: HistoryNode
    loop: Turns
    admin: SimulatedClient

    def __init__(self, settings: Settings) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ems-faults-", dir=MEMORY if MEMORY.is_dir() else None))
        self.settings = settings
        self.verify = settings.verify
        self.files = open_files()
        self.times = Times()
        self.points = Points()
        self.below = Below(settings.tiers, self.times, self.points)
        self.tenants = tenants.Tenants(self.home / "tenants", self.times) if settings.tenants else None
        self.counts: Counter[str] = Counter()
        self.surprises: list[BaseException] = []
        """What came up in the loop and nobody caught."""
        self.life = 0
        self._living: set[Hashable] = set()
        self._born = 0
        self.late: list[Late] = []
        self.processes: list[Writer] = [self.born() for _ in range(SEATS)]
        """Who is in each place."""
        self.clients: list[SimulatedClient] = []
        self.sizes = SEGMENTS
        self.meaning: dict[bytes, tuple[str, Tail | None]] = {}
        """The path to which a key belongs, and its tokens if it is that of a block that is not full."""
        # The account
        self.committed: dict[Known, bytes] = {}
        """Packed places of the pages whose commit was answered, or that came from a tier."""
        self.ever: set[Known] = set()
        """What was committed at any time, answered or not."""
        self.pinned: dict[Known, float] = {}
        """Until when pages were pinned."""
        self.tails_lost: set[Known] = set()
        """Pages that were committed while memory was full: their tokens may not be found again."""
        self.tails_hurt = False
        self.hurt: dict[SlotLocation, int] = {}
        """Damaged bytes of pages, with the life of the node in which it was done."""
        self.unsummed: set[SlotLocation] = set()
        """Pages whose writer gave no checksum."""
        self.never_summed: set[Known] = set()
        """The same by their names."""
        self.hurt_headers: set[Slot] = set()
        self.hurt_segments: set[int] = set()
        self.mapped: dict[Identity, set[str]] = {}
        """Tenants who have ever mapped a file."""

    @property
    def now(self) -> float:
        """What the node's clock shows."""
        return self.times.now()

    def config(self) -> NodeConfig:
        """The settings of the next node."""
        return NodeConfig(
            directory=self.home / "pool",
            socket=self.home / "s",
            size=SEGMENT * self.sizes,
            segment_size=SEGMENT,
            high_watermark=self.settings.watermark,
            policy=self.settings.policy,
            verify=self.verify.value,
            tenants=None if self.tenants is None else self.tenants.path,
            http_port=None,
        )

    # Time

    def new_loop(self) -> None:
        """Forget all that the process before meant to do."""
        if hasattr(self, "loop"):
            self.loop.close()
        self.loop = Turns(self.times, self.surprises.append)

    def settle(self) -> None:
        """Let the node do what it put off.

        Raises:
            Crash: it was killed at that.
            Violation: something came up that nobody caught.
        """
        self.loop.go_round()
        self._look_behind()

    def let_pass(self, seconds: float) -> None:
        """Let time go by; raises what :meth:`settle` does."""
        self.loop.let_pass(seconds)
        self._look_behind()

    def _look_behind(self) -> None:
        strange = [one for one in self.surprises if not isinstance(one, Crash)]
        self.surprises.clear()
        if strange:
            raise Violation(f"nobody caught {type(strange[0]).__name__}: {strange[0]}") from strange[0]
        if self.points.dead:
            raise Crash

    def tick(self) -> None:
        """The node's second, before its time."""
        assert self.node._ticker is not None
        self.node._ticker.cancel()
        self.node._tick()
        self.settle()

    # Clients

    def connect(self, position: int) -> SimulatedClient:
        """A new client in a place; on a node with tenants of that place's tenant, if its key opens anything."""
        tenant = TENANTS[position % len(TENANTS)] if self.tenants is not None else ""
        client = self._client(tenant, self.processes[position])
        if self.tenants is not None:
            opens = self.tenants.opens(tenant)
            if self.tenants.greet(client) != opens:
                raise Violation(f"a key of {tenant} was {'refused' if opens else 'accepted'} that should not be")
            if not opens:
                self.counts["greeting refused"] += 1
                client.close(None)
        return client

    def connect_all(self) -> None:
        """New clients in all places, and an administrator."""
        self.clients = [self.connect(position) for position in range(SEATS)]
        self.admin = self._client("", self.born())
        if self.tenants is not None:
            tenants.greet_as_administrator(self.admin)

    # Processes

    def born(self) -> Writer:
        """Another process."""
        self._born += 1
        writer = Writer(GONE + self._born, 1, self._born.to_bytes(INSTANCE_BYTES, "little"))
        self._living.add(writer.process)
        return writer

    def lives(self, writer: Writer) -> bool:
        """Whether the process of a writer has not ended."""
        return writer.process in self._living

    def ends(self, writer: Writer) -> None:
        """A process ends: it writes nothing any more."""
        self._living.discard(writer.process)
        self.late = [late for late in self.late if late.writer != writer]
        self.processes = [self.born() if one == writer else one for one in self.processes]

    def _client(self, tenant: str, writer: Writer) -> SimulatedClient:
        client_id = self.node.clients.next_client_id
        self.node.clients.next_client_id += 1
        client = SimulatedClient(self.node, client_id, tenant, writer, self._shut_out)
        self.node.clients.limits.came(client_id, f"process {writer.pid}", self.node.clients.room())
        self.node.core.writers[client_id] = writer
        self.node.clients.connections[client_id] = cast("Connection", client)
        self.node.clients.limits.came(client_id, client.party, self.node.clients.room())
        return client

    def _shut_out(self, client: SimulatedClient) -> None:
        """The node ended a connection, whose client lives."""
        self.counts["shut out"] += 1
        self.cut_off(client)
        for reading in client.reading:
            reading.leased = False

    def cut_off(self, client: SimulatedClient) -> None:
        """The connection of a client that lives ended: it may go on writing, and reading."""
        for writing in client.writing:
            for ref in writing.granted.values():
                file, size = writing.files[ref.segment], size_of(writing.name)
                self.late.append(Late(client.writer, writing.maps, ref, file, size, writing.loose))
        client.writing.clear()
        client.announced.clear()

    def map(self, client: SimulatedClient, refs: list[PageRef]) -> None:
        """A client maps what it was promised."""
        client.maps.map(refs)
        if self.tenants is not None:
            for file in client.maps.files:
                self.mapped.setdefault(file, set()).add(client.tenant)

    def loosen(self, slot: Slot) -> None:
        """The header of a slot was damaged: whoever was promised it may not be alone there any more."""
        for late in self.late:
            late.loose = late.loose or late.ref[:2] == slot
        for client in self.clients:
            for writing in client.writing:
                writing.loose = writing.loose or any(ref[:2] == slot for ref in writing.granted.values())

    # What the node does

    def granting(self, node: HistoryNode, namespace: int, keys: list[bytes]) -> Callable[[Reserved], None]:
        """A reservation is about to be made."""
        return grants.granting(self, node, namespace, keys)

    def promoted(self, node: HistoryNode, client_id: int, pages: list[Page]) -> None:
        """Pages came from a tier and can be read."""
        assert client_id < 0
        names = {id(ns.index.get(page.key)): ns.name for ns in node.core.namespaces for page in pages}
        for page in pages:
            known = names[id(page)], page.key
            self.committed[known] = page.ref
            self.counts["page promoted"] += 1
            ref = PageRef.unpack(page.ref)
            raw = page_memory(node.arena, ref, size_of(known[0]))
            if known in self.never_summed and raw != content(*known):
                # It was damaged in memory before it went down, and nobody could know.
                self.hurt[ref[:3]] = self.life
                self.unsummed.add(ref[:3])
            if known not in self.ever:
                raise Violation(f"page {page.key.hex()} of {known[0]} came from a tier, and nobody ever stored it")

    # Looking in

    def pages(self) -> dict[Known, Page]:
        """All pages of the brain."""
        return {(namespace.name, page.key): page for namespace in self.node.core.namespaces for page in namespace.index}

    def account(self) -> None:
        """Forget what the node let go of, which it may."""
        pages = self.pages()
        for known, ref in list(self.committed.items()):
            page = pages.get(known)
            if page is None or page.ref != ref:
                del self.committed[known]

    def heal(self) -> None:
        """Forget the damage of descriptions that were written anew."""
        for number in list(self.hurt_segments):
            raw = bytes(map_segment(self.node.arena, number)[:HEADERS_OFFSET])
            if not isinstance(unpack_description(raw, SEGMENT), str):
                self.hurt_segments.discard(number)

    def remember(self, node: HistoryNode) -> None:
        """Count what a process did that ends."""
        core = node.core
        self.counts["page evicted"] += core.reclaimer.evicted
        for state in node.tier_manager.states:
            for name in ("pages_written", "fetch_corrupt", "write_corrupt", "hung", "not_offered", "fetch_misses"):
                self.counts[f"tier: {name.replace('_', ' ')}"] += state.counts[name]
            self.counts["tier: cut out"] += state.reading.cuts + state.writing.cuts
            self.counts["tier: not queued for want of room"] += state.write_back.dropped
            self.counts["tier: packs evicted"] += state.tier.figures()["evicted_packs"]
            self.counts["tier: packs expired"] += state.tier.figures()["expired_packs"]
        self.counts.update(node.workers.counts())

    # The end

    def abandon(self) -> None:
        """Let go of a node with which something is wrong."""
        self.points.dead = True
        self.node.clients.connections.clear()
        self.node.arena.leave()
        if self.node.clients.listener is not None:
            self.node.clients.listener.close(stays=True)

    def everybody_leaves(self) -> None:
        """No client is left, and none of their processes."""
        self._living.clear()
        self.late.clear()
        self.processes = [self.born() for _ in self.processes]
        for client in (*self.clients, self.admin):
            client.close(None)
            client.reading.clear()

    def close(self) -> None:
        """Remove everything.

        Raises:
            Violation: files were left open.
        """
        self.clients.clear()
        self.late.clear()
        self.loop.close()
        for place in self.below.places:
            self.counts.update({f"a place {fault}": count for fault, count in place.counts.items()})
        shutil.rmtree(self.home, ignore_errors=True)
        left = open_files() - self.files
        if left > 0:
            gc.collect()  # what an exception on its way refers to is freed late
            left = open_files() - self.files
        if left > 0:
            raise Violation(f"{left} files were left open")


def open_files() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
