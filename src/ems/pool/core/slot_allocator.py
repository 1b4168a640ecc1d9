"""Who owns which slot: segments carved for namespaces, their free slots, the memory that was touched.

What always holds: a slot is handed out once until it is given back; only slots that lie whole in memory
that was touched before are handed out; a slot's generation grows by one with each use; a segment changes
its namespace only when none of its slots is out; its memory never passes from one tenant to another, but is
replaced by fresh memory, which has to be touched anew.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ems.pool.layout import Geometry, carve, pack_ref, unpack_ref

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_GENERATION_MASK = 0xFFFFFFFF


def _parted(entries: array[int], number: int) -> tuple[array[int], array[int]]:
    """Those of ``entries`` that are of segment ``number``, and the others; there may be a million."""
    all_of_them = np.frombuffer(entries, np.uint64)
    mine = all_of_them >> np.uint64(_SLOT_BITS) == number
    return array("Q", all_of_them[mine].tobytes()), array("Q", all_of_them[~mine].tobytes())


@dataclass(slots=True, eq=False)
class Segment:
    """One segment: its size, how much of it was touched, and how it is carved."""

    number: int
    size: int
    touched: int = 0
    namespace: int | None = None
    tenant: str | None = None
    """Whose pages its memory has held, and who may have mapped it; None when it is fresh."""
    geometry: Geometry | None = None
    generations: array[int] = field(default_factory=lambda: array("I"))
    offered: int = 0
    used: int = 0
    closing: bool = False
    """Whether it is to be given up: no slot of it is handed out any more."""
    stale: bool = False
    """Whether somebody may still write into slots that were given back: its memory is to be replaced first."""

    def room_for(self, page_size: int) -> bool:
        """Whether its touched part holds a page of ``page_size`` bytes, if it were carved for such pages."""
        return not self.closing and carve(self.size, page_size).slots_within(self.touched) > 0


class SlotAllocator:
    """All segments of a node and the free slots of each namespace.

    Namespaces are numbers here.  ``sizes`` are the bytes of each segment.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.segments = [Segment(number, size) for number, size in enumerate(sizes)]
        self.total = sum(sizes)
        """Bytes of all segments."""
        self._free: dict[int, array[int]] = {}
        self._carved: Counter[int] = Counter()
        """Slots of each namespace's segments, touched or not."""
        self._offered: Counter[int] = Counter()
        """Those of them that were touched: all that are free or out."""
        self._touching = True
        self._lost: set[int] = set()
        """Segments whose memory was to be replaced and could not be."""
        self._freed: set[tuple[int, int]] = set()
        self._closed: dict[int, array[int]] = {}
        """Free slots of the segments that were closed, by their numbers."""

    def capacity(self, namespace: int) -> int:
        """Slots that ``namespace`` has or will have once its segments are touched, used or not."""
        return self._carved[namespace] if self._touching else self._offered[namespace]

    def used(self, namespace: int) -> int:
        return self._offered[namespace] - len(self._free.get(namespace, ()))

    def untouched(self, namespace: int) -> bool:
        """Whether waiting brings ``namespace`` slots, because memory that it has or could have is being touched."""
        return self._touching and any(
            segment.touched < segment.size
            for segment in self.segments
            if segment.namespace in (None, namespace) and not segment.closing
        )

    def touching_ended(self) -> None:
        """No more memory will be touched: what is untouched by now is never handed out."""
        self._touching = False

    def unassigned(self, page_size: int, tenant: str = "") -> Segment | None:
        """A segment without a namespace that has room for a page of ``tenant`` in its touched part.

        Those whose memory need not be replaced for it come first, then the most touched.
        """

        def as_it_is(segment: Segment) -> bool:
            return segment.tenant in (None, tenant)

        fresh = [segment for segment in self.segments if segment.namespace is None and segment.room_for(page_size)]
        fit = [segment for segment in fresh if as_it_is(segment) or self.settled(segment)]
        return max(fit, key=lambda segment: (as_it_is(segment), segment.touched, -segment.number), default=None)

    def settled(self, segment: Segment) -> bool:
        """Whether nobody is touching ``segment``, so that its memory may be replaced, and memory is to be had."""
        return not self._lost and (not self._touching or segment.touched >= segment.size)

    def renew(self, segment: Segment) -> None:
        """Take ``segment``, none of whose slots is out, from its namespace; its memory is replaced by fresh one."""
        self.unassign(segment.number)
        segment.touched = 0
        segment.stale = False
        self._touching = True

    def unassign(self, number: int) -> None:
        """Take segment ``number``, none of whose slots is out and which nobody has mapped, from its namespace."""
        segment = self.segments[number]
        self._take_back(segment)
        segment.namespace = segment.geometry = segment.tenant = None
        segment.offered = 0

    def lose(self, number: int) -> None:
        """The memory of segment ``number`` could not be replaced: nobody has it until :meth:`regain`."""
        self.unassign(number)
        self.segments[number].touched = 0
        self.segments[number].closing = True
        self._lost.add(number)

    def regain(self, number: int) -> None:
        """Segment ``number`` has fresh memory after all, which is to be touched."""
        self._lost.discard(number)
        self.segments[number].closing = False
        # What was told of the memory before may have come after it was lost.
        self.segments[number].touched = 0
        self.segments[number].stale = False
        self._touching = True

    def is_lost(self, number: int) -> bool:
        """Whether segment ``number`` has no memory until :meth:`regain`."""
        return number in self._lost

    def never_had(self, number: int) -> None:
        """There was no memory for segment ``number``, which :meth:`add` gave a number."""
        self.close(number)
        self.give_up(number)
        if number == len(self.segments) - 1 and not self.segments[number].generations:
            self.segments.pop()

    def _take_back(self, segment: Segment) -> None:
        if segment.used:
            raise ValueError(f"segment {segment.number} has {segment.used} slots in use, expected none")
        if segment.namespace is not None and segment.geometry is not None:
            self._carved[segment.namespace] -= segment.geometry.slot_count
            self._offered[segment.namespace] -= segment.offered
            _, self._free[segment.namespace] = _parted(self._free[segment.namespace], segment.number)

    def assign(self, segment: Segment, namespace: int, page_size: int, tenant: str = "") -> Geometry:
        """Carve ``segment``, none of whose slots is out, for pages of ``namespace``, one of ``tenant``."""
        if segment.tenant not in (None, tenant) or segment.stale:
            raise ValueError(f"segment {segment.number} may be written to by others, expected fresh memory")
        self._take_back(segment)
        segment.tenant = tenant
        geometry = carve(segment.size, page_size)
        # Generations never restart: a reader of the old pages must not take a new page for the one it knew.
        latest = int(np.frombuffer(segment.generations, np.uint32).max(initial=0))
        start = (latest + 1) & _GENERATION_MASK
        segment.generations = array("I", [start]) * geometry.slot_count
        segment.namespace, segment.geometry, segment.offered = namespace, geometry, 0
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
        if segment.geometry is None or segment.namespace is None or segment.closing:
            return
        reach = segment.geometry.slots_within(segment.touched)
        if reach > segment.offered:
            slots = np.arange(reach - 1, segment.offered - 1, -1, np.uint64)
            self._free[segment.namespace].frombytes((slots | np.uint64(segment.number << _SLOT_BITS)).tobytes())
            self._offered[segment.namespace] += reach - segment.offered
            segment.offered = reach

    def take(self, namespace: int, count: int) -> list[bytes]:
        """Slots for ``count`` new pages of ``namespace``, packed references; fewer where there are no more.

        Those that were freed last, in the order in which they lie: headers side by side are written in one go.
        """
        stack = self._free.get(namespace)
        if not stack or not count:
            return []
        entries = sorted(stack[-count:])
        del stack[-count:]
        taken = []
        for entry in entries:
            number, slot = entry >> _SLOT_BITS, entry & _SLOT_MASK
            segment = self.segments[number]
            segment.used += 1
            generation = segment.generations[slot] = (segment.generations[slot] + 1) & _GENERATION_MASK
            taken.append(pack_ref(number, slot, generation))
        return taken

    def give_back(self, ref: bytes, *, told: bool = True) -> None:
        """The slot of ``ref`` is free again; its header is to say so, unless it goes before the slot is used."""
        number, slot, generation = unpack_ref(ref)
        segment = self.segments[number]
        if segment.namespace is None or segment.generations[slot] != generation:
            raise ValueError(f"slot {slot} of segment {number} was given back twice")
        segment.used -= 1
        if told:
            self._freed.add((number, slot))
        entry = number << _SLOT_BITS | slot
        if segment.closing:
            segment.offered -= 1
            self._offered[segment.namespace] -= 1
            self._closed[number].append(entry)
            return
        self._free[segment.namespace].append(entry)

    @property
    def unclear(self) -> bool:
        """Whether :meth:`freed` has something to tell."""
        return bool(self._freed)

    def freed(self) -> set[tuple[int, int]]:
        """Segment and number of the slots that were given back since the last call."""
        if not self._freed:
            return self._freed
        freed, self._freed = self._freed, set()
        return freed

    def adopt(
        self, number: int, namespace: int, page_size: int, generations: Sequence[int], out: Collection[int]
    ) -> None:
        """Segment ``number`` is carved for ``namespace`` already, by an earlier node.

        ``generations`` are those of all of its slots; the slots ``out`` are taken, those of them that were touched.
        """
        segment = self.segments[number]
        geometry = segment.geometry = carve(segment.size, page_size)
        segment.namespace, segment.generations = namespace, array("I", generations)
        segment.offered, segment.used = geometry.slots_within(segment.touched), len(out)
        self._carved[namespace] += geometry.slot_count
        self._offered[namespace] += segment.offered
        base, taken = number << _SLOT_BITS, set(out)
        free = self._free.setdefault(namespace, array("Q"))
        free.extend(base | slot for slot in range(segment.offered - 1, -1, -1) if slot not in taken)

    def know_tenants(self, tenants: Mapping[int, str], found: Iterable[int] = ()) -> None:
        """The memory of these segments has held pages of these tenants, who may still map it.

        That of the segments ``found`` was there before: where no tenant is known, anybody may have mapped it.
        """
        for number, tenant in {**dict.fromkeys(found, ""), **tenants}.items():
            if 0 <= number < len(self.segments):
                self.segments[number].tenant = tenant

    # Another size

    def add(self, size: int) -> int:
        """Have a further segment of ``size`` bytes, none of which is touched; its number.

        One that was given up before comes back, if there is one.
        """
        self._touching = True
        for segment in self.segments:
            if not segment.size:
                segment.size = size
                self.total += size
                return segment.number
        self.segments.append(Segment(len(self.segments), size))
        self.total += size
        return len(self.segments) - 1

    def close(self, number: int) -> None:
        """Hand out no more slots of segment ``number``, which is to be given up once none is out."""
        segment = self.segments[number]
        segment.closing = True
        namespace = segment.namespace
        if namespace is None or segment.geometry is None:
            return
        self._closed[number], self._free[namespace] = _parted(self._free[namespace], number)
        self._carved[namespace] -= segment.geometry.slot_count
        self._offered[namespace] -= segment.offered - segment.used
        segment.offered = segment.used

    def reopen(self, number: int) -> None:
        """Segment ``number``, which was closed, is not given up after all: its slots are handed out again."""
        segment = self.segments[number]
        segment.closing = False
        free = self._closed.pop(number, None)
        if free is not None and segment.namespace is not None and segment.geometry is not None:
            self._free[segment.namespace].extend(free)
            segment.offered += len(free)
            self._offered[segment.namespace] += len(free)
            self._carved[segment.namespace] += segment.geometry.slot_count
            self._offer(segment)

    def give_up(self, number: int) -> None:
        """Segment ``number``, which was closed and none of whose slots is out, has no memory any more."""
        segment = self.segments[number]
        if segment.used or not segment.closing:
            raise ValueError(f"segment {number} has {segment.used} slots in use, expected a closed one with none")
        segment.namespace = segment.geometry = None
        self.total -= segment.size
        segment.size = segment.touched = segment.offered = 0
        self._closed.pop(number, None)
        # Its headers go with its memory.
        self._freed = {slot for slot in self._freed if slot[0] != number}
        segment.closing = segment.stale = False
