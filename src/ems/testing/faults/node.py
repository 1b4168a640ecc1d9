"""The node of a history: the real one, whose time, threads and tiers are the history's.

Nobody can connect to it: its verbs are called as a connection would.  What always holds: what it grants is looked at in
the moment in which it is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from ems.config import NodeConfig
from ems.pool.node.memory import Memory, Touching
from ems.pool.segments.layout import PageRef
from ems.pool.tiers.carrier import Carrier
from ems.testing.faults.below import Below, Workers
from ems.testing.faults.points import CrashingNode, Points
from ems.testing.faults.seats import Identity, identity
from ems.testing.faults.times import Times

if TYPE_CHECKING:
    from ems.pool.core.answers import Reserved
    from ems.pool.core.index import Page
    from ems.pool.keys import Tail
    from ems.pool.node.pool_node import Node
    from ems.pool.node.succession import Inheritance
    from ems.pool.tiers.seam import Tier
    from ems.pool.tiers.settings import TierConfig

TOUCHED_AFTER = 0.15
"""Seconds after which memory that is to be touched has been."""


class Witness(Protocol):
    """Whoever looks at what a node does."""

    def granting(self, node: HistoryNode, namespace: int, keys: list[bytes]) -> Callable[[Reserved], None]:
        """A reservation is about to be made; what is returned is told what came of it."""

    def promoted(self, node: HistoryNode, owner: int, pages: list[Page]) -> None:
        """Pages came from a tier."""


class MemoryInTurn(Memory):
    """Memory that is touched a moment later, on this very thread."""

    def __init__(self, node: Node, renewed: Callable[[int, str | None], None]) -> None:
        super().__init__(node, renewed)
        self._node = node

    def _touch(self, work: Touching) -> None:
        self._touching += 1

        def touch() -> None:
            node = self._node
            if node.handed_over.is_set():
                return
            self._prefault(work, None)
            for number, size in enumerate(node.arena.sizes):
                segment = node.core.space.segments[number]
                if segment.size and segment.number not in self.lost:
                    node.arena.touched[number] = size

        self._node.loop.call_later(TOUCHED_AFTER, touch)


class HistoryNode(CrashingNode):
    """A node in virtual time; ``below`` are its tiers, None when it has none."""

    def __init__(
        self,
        config: NodeConfig,
        times: Times,
        points: Points,
        below: Below,
        witness: Witness,
        inheritance: Inheritance | None = None,
    ) -> None:
        self._times = times
        self._below = below
        self._witness = witness
        self.workers = Workers(below)
        self._into: dict[int, list[tuple[PageRef, int, Identity]]] = {}
        """Where what is fetched is written to, by the owner that stands for it."""
        super().__init__(config, times.now, points, inheritance)

    def _wall(self) -> float:
        return self._times.wall()

    def _open_tiers(self) -> list[tuple[TierConfig, Tier]]:
        return self._below.open()

    def _new_carrier(self) -> Carrier:
        return Carrier(self, self._open_tiers(), self._clock, self.workers.crew)

    def _new_memory(self) -> Memory:
        return MemoryInTurn(self, self._tenancy.renewed)

    def promise(
        self, owner: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Reserve, and have it looked at."""
        granted = self._witness.granting(self, namespace, [parent, *keys])
        reserved = super().promise(owner, namespace, parent, keys, tail)
        granted(reserved)
        if owner < 0:
            refs = [PageRef.unpack(page.ref) for page in reserved.granted]
            size = reserved.page_size
            self._into[owner] = [(ref, size, identity(self.arena.descriptor(ref.segment))) for ref in refs]
        return reserved

    def fetching_into(self) -> Iterator[tuple[PageRef, int, Identity]]:
        """Where threads of tiers may write at this moment: the place, its size, the file."""
        for level in self.carrier.levels:
            for job, (owner, _) in level.fetches.items():
                if job.started_at is not None and not job.done.is_set():
                    yield from self._into.get(owner, ())

    def publish(self, owner: int, reservation: int, checksums: dict[int, int]) -> None:
        """Commit what came from a tier, and have it looked at."""
        waiting = self.core._reservations.all[reservation].waiting  # noqa: SLF001 - what is about to be published
        pages = [waiting[position] for position in sorted(checksums)]
        super().publish(owner, reservation, checksums)
        self._witness.promoted(self, owner, pages)
