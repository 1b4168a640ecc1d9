"""The node of a history: the real one, whose time, threads and tiers are the history's.

Nobody can connect to it: its verbs are called as a connection would.  What always holds: what it grants is looked at in
the moment in which it is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from ems.config import NodeConfig
from ems.pool.layout import PageRef, Writer
from ems.pool.node.memory import Memory, Touching
from ems.pool.service.storing import Storing
from ems.pool.tiers.manager import TierManager
from tests.faults.below import Below, Workers
from tests.faults.points import CrashingNode, Points
from tests.faults.simulated_clients import Identity, SimulatedClient, identity
from tests.faults.times import Times

if TYPE_CHECKING:
    from ems.pool.core.writing import Begun, Reserved
    from ems.pool.keys import Tail
    from ems.pool.node.restart import KeptOpen
    from ems.pool.pages import Page
    from ems.pool.tiers.seam import Tier
    from ems.pool.tiers.settings import TierConfig

TOUCHED_AFTER = 0.15
"""Seconds after which memory that is to be touched has been."""


class Witness(Protocol):
    """Whoever looks at what a node does."""

    def granting(self, node: HistoryNode, namespace: int, keys: list[bytes]) -> Callable[[Reserved], None]:
        """A reservation is about to be made; what is returned is told what came of it."""

    def born(self) -> Writer:
        """Another process."""

    def lives(self, writer: Writer) -> bool:
        """Whether the process of a writer has not ended."""

    def promoted(self, node: HistoryNode, client_id: int, pages: list[Page]) -> None:
        """Pages came from a tier."""


class SteppedMemory(Memory):
    """Memory that is touched a moment later, on this very thread."""

    def _touch(self, work: Touching) -> None:
        self._touching += 1

        def touch() -> None:
            node = self._host
            self._prefault(work, None)
            for number, size in enumerate(node.arena.sizes):
                segment = node.core.slots.segments[number]
                if segment.size and segment.number not in self.lost:
                    node.arena.touched[number] = size

        self._host.loop.call_later(TOUCHED_AFTER, touch)


class WatchedStoring(Storing):
    """Has all reservations of ``node`` looked at."""

    def __init__(self, node: HistoryNode) -> None:
        super().__init__(node.core, node.applier)
        self._node = node

    def reserve(
        self,
        client_id: int,
        namespace: int,
        parent: bytes,
        keys: list[bytes],
        tails: Sequence[Tail | None] = (),
        begun: Begun | None = None,
    ) -> Reserved:
        """Reserve, and have it looked at."""
        granted = self._node.see(client_id, [parent, *keys], namespace)
        reserved = super().reserve(client_id, namespace, parent, keys, tails, begun)
        granted(reserved)
        return reserved


class HistoryNode(CrashingNode):
    """A node in virtual time; ``below`` are its tiers, None when it has none."""

    def __init__(
        self,
        config: NodeConfig,
        times: Times,
        points: Points,
        below: Below,
        witness: Witness,
        pins: KeptOpen | None = None,
    ) -> None:
        self._times = times
        self._below = below
        self._witness = witness
        self.workers = Workers(below)
        self._into: dict[int, list[tuple[PageRef, int, Identity]]] = {}
        """Where what is fetched is written to, by the owner that stands for it."""
        super().__init__(config, times.now, points, pins)
        self._own_process = witness.born()

    @property
    def process(self) -> Writer:
        """The process that this node is."""
        return self._own_process

    def may_write(self, writer: Writer) -> bool:
        return not writer.pid or self._witness.lives(writer)

    def writer_at(self, client_id: int) -> Writer:
        return cast("SimulatedClient", self.clients.connections[client_id]).writer

    def wall(self) -> float:
        return self._times.wall()

    def _open_tiers(self) -> Sequence[tuple[TierConfig, Tier]]:
        return self._below.open()

    def _new_tier_manager(self) -> TierManager:
        return TierManager(self, self._open_tiers(), self.clock, self.workers.crew)

    def _new_memory(self) -> Memory:
        return SteppedMemory(self)

    def _new_storing(self) -> Storing:
        return WatchedStoring(self)

    def see(self, client_id: int, keys: list[bytes], namespace: int) -> Callable[[Reserved], None]:
        """A reservation is about to be made; what is returned is told what came of it."""
        granted = self._witness.granting(self, namespace, keys)

        def see(reserved: Reserved) -> None:
            granted(reserved)
            if client_id < 0:
                refs = [PageRef.unpack(page.ref) for page in reserved.granted]
                size = reserved.page_size
                self._into[client_id] = [
                    (ref, size, identity(self.arena._files[ref.segment].descriptor)) for ref in refs
                ]

        return see

    def fetching_into(self) -> Iterator[tuple[PageRef, int, Identity]]:
        """Where threads of tiers may write at this moment: the place, its size, the file."""
        for state in self.tier_manager.states:
            for job, (client_id, _) in state.fetches.items():
                if job.started_at is not None and not job.done():
                    yield from self._into.get(client_id, ())

    def publish(self, client_id: int, reservation: int, checksums: dict[int, int]) -> None:
        """Commit what came from a tier, and have it looked at."""
        waiting = self.core.reservations.all[reservation].waiting
        pages = [waiting[position] for position in sorted(checksums)]
        super().publish(client_id, reservation, checksums)
        self._witness.promoted(self, client_id, pages)
