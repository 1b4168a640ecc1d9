"""Who owns which slot: segments carved for namespaces, their free slots, the memory that was touched.

What always holds: a slot is handed out once until it is given back; only slots that lie whole in memory
that was touched before are handed out; a slot's generation grows by one with each use; a segment changes
its namespace only when none of its slots is out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from ems.pool.layout import Geometry, PageRef, carve

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_GENERATION_MASK = 0xFFFFFFFF


class Segment:
    """One segment: its size, how much of it was touched, and how it is carved."""

    __slots__ = ("generations", "geometry", "number", "offered", "owner", "size", "touched", "used")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.touched = 0
        self.owner: int | None = None
        self.geometry: Geometry | None = None
        self.generations: array[int] = array("I")
        self.offered = 0
        self.used = 0

    def room_for(self, page_size: int) -> bool:
        """Whether its touched part holds a page of ``page_size`` bytes, if it were carved for such pages."""
        return carve(self.size, page_size).slots_within(self.touched) > 0


class Space:
    """All segments of a node and the free slots of each namespace.

    Namespaces are numbers here.  ``sizes`` are the bytes of each segment.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.segments = [Segment(number, size) for number, size in enumerate(sizes)]
        self._free: dict[int, array[int]] = {}
        self._carved: Counter[int] = Counter()
        """Slots of each namespace's segments, touched or not."""
        self._offered: Counter[int] = Counter()
        """Those of them that were touched: all that are free or out."""
        self._touching = True

    def capacity(self, namespace: int) -> int:
        """Slots that ``namespace`` has or will have once its segments are touched, used or not."""
        return self._carved[namespace] if self._touching else self._offered[namespace]

    def used(self, namespace: int) -> int:
        """Slots of ``namespace`` that are out."""
        return self._offered[namespace] - len(self._free.get(namespace, ()))

    def untouched(self, namespace: int) -> bool:
        """Whether waiting brings ``namespace`` slots, because memory that it has or could have is being touched."""
        return self._touching and any(
            segment.touched < segment.size for segment in self.segments if segment.owner in (None, namespace)
        )

    def touching_ended(self) -> None:
        """No more memory will be touched: what is untouched by now is never handed out."""
        self._touching = False

    def unassigned(self, page_size: int) -> Segment | None:
        """A segment without a namespace that has room for a page in its touched part, the most touched first."""
        fresh = [segment for segment in self.segments if segment.owner is None and segment.room_for(page_size)]
        return max(fresh, key=lambda segment: (segment.touched, -segment.number), default=None)

    def idle_of_others(self, namespace: int, page_size: int) -> Segment | None:
        """A segment of another namespace, none of whose slots is out, that has room for a page."""
        for segment in self.segments:
            if segment.owner not in (None, namespace) and segment.used == 0 and segment.room_for(page_size):
                return segment
        return None

    def assign(self, segment: Segment, namespace: int, page_size: int) -> Geometry:
        """Carve ``segment``, none of whose slots is out, for pages of ``namespace``."""
        if segment.used:
            raise ValueError(f"segment {segment.number} has {segment.used} slots in use, expected none")
        if segment.owner is not None and segment.geometry is not None:
            self._carved[segment.owner] -= segment.geometry.slot_count
            self._offered[segment.owner] -= segment.offered
            kept = [entry for entry in self._free[segment.owner] if entry >> _SLOT_BITS != segment.number]
            self._free[segment.owner] = array("Q", kept)
        geometry = carve(segment.size, page_size)
        # Generations never restart: a reader of the old pages must not take a new page for the one it knew.
        start = (max(segment.generations, default=0) + 1) & _GENERATION_MASK
        segment.generations = array("I", [start]) * geometry.slot_count
        segment.owner, segment.geometry, segment.offered = namespace, geometry, 0
        self._free.setdefault(namespace, array("Q"))
        self._carved[namespace] += geometry.slot_count
        self._offer(segment)
        return geometry

    def touch(self, number: int, touched: int) -> None:
        """The first ``touched`` bytes of segment ``number`` can be written without a first touch."""
        segment = self.segments[number]
        if touched > segment.touched:
            segment.touched = min(touched, segment.size)
            self._offer(segment)

    def _offer(self, segment: Segment) -> None:
        if segment.geometry is None or segment.owner is None:
            return
        reach = segment.geometry.slots_within(segment.touched)
        if reach > segment.offered:
            base = segment.number << _SLOT_BITS
            self._free[segment.owner].extend(base | slot for slot in range(reach - 1, segment.offered - 1, -1))
            self._offered[segment.owner] += reach - segment.offered
            segment.offered = reach

    def take(self, namespace: int) -> PageRef | None:
        """A slot for a new page of ``namespace``, the one freed last first."""
        stack = self._free.get(namespace)
        if not stack:
            return None
        entry = stack.pop()
        segment, slot = self.segments[entry >> _SLOT_BITS], entry & _SLOT_MASK
        assert segment.geometry is not None
        generation = (segment.generations[slot] + 1) & _GENERATION_MASK
        segment.generations[slot] = generation
        segment.used += 1
        return PageRef(segment.number, slot, generation, segment.geometry.slot_offset(slot))

    def give_back(self, ref: PageRef) -> None:
        """The slot of ``ref`` is free again."""
        segment = self.segments[ref.segment]
        if segment.owner is None or segment.generations[ref.slot] != ref.generation:
            raise ValueError(f"slot {ref.slot} of segment {ref.segment} was given back twice")
        segment.used -= 1
        self._free[segment.owner].append(ref.segment << _SLOT_BITS | ref.slot)

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = []
        seen: set[int] = set()
        free_in: dict[int, int] = {}
        for namespace, stack in self._free.items():
            for entry in stack:
                number = entry >> _SLOT_BITS
                if entry in seen:
                    broken.append(f"slot {entry & _SLOT_MASK} of segment {number} is free twice")
                seen.add(entry)
                free_in[number] = free_in.get(number, 0) + 1
                if self.segments[number].owner != namespace:
                    broken.append(f"segment {number} has free slots in namespace {namespace} that does not own it")
        broken += [
            f"segment {segment.number} lost slots: {segment.used} used of {segment.offered}"
            for segment in self.segments
            if free_in.get(segment.number, 0) + segment.used != segment.offered
        ]
        for namespace in self._free:
            own = [segment for segment in self.segments if segment.owner == namespace]
            if self._offered[namespace] != sum(segment.offered for segment in own):
                broken.append(f"namespace {namespace} miscounts the slots that it was offered")
            if self._carved[namespace] != sum(segment.geometry.slot_count for segment in own if segment.geometry):
                broken.append(f"namespace {namespace} miscounts its slots")
        return broken
