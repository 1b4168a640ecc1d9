"""Slots that are handed to nobody though no page is known in them.

A writer that was cut off may go on copying for any time, so a slot of it is a deferred free: it is given back when the
writer's process has ended, when the writer says that it stopped, or when the slot's memory is replaced, never because
time went by.  A quarantined slot, whose bytes were wrong, is given back with its memory only.  What always holds: such
a slot is given back once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable

from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.layout import PageRef, Writer

REPLACE_SECONDS = 30.0
"""How long writers may take to say that they stopped before the memory of their slots is replaced."""


class DeferredFrees:
    """Slots of ``slots`` by where they lie (packed): deferred ones of each writer, and quarantined ones."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of: dict[Writer, dict[int, set[bytes]]] = {}
        """By the segments that they lie in."""
        self._waiting = Counter[int]()
        """How many slots of each segment wait for their writers."""
        self._bytes_of = Counter[Hashable]()
        """Bytes of the slots that wait for the writers of each process."""
        self._quarantined: set[bytes] = set()
        self._since: dict[int, float] = {}
        """Since when slots of each segment wait."""

    @property
    def resting(self) -> int:
        return self._waiting.total()

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def awaits(self, writer: Writer) -> bool:
        return writer in self._of

    @property
    def writers(self) -> list[Writer]:
        return list(self._of)

    def bytes_of(self, process: Hashable) -> int:
        """Bytes of the slots that wait for the writers of one process."""
        return self._bytes_of[process]

    @property
    def bytes_in(self) -> dict[int, int]:
        """Bytes of the slots of each segment that wait for their writers."""
        return {number: count * self._stride(number) for number, count in self._waiting.items()}

    def _stride(self, segment: int) -> int:
        geometry = self._slots.segments[segment].geometry
        return geometry.slot_stride if geometry else 0

    def _count(self, writer: Writer, segment: int, more: int) -> None:
        process = writer.process
        self._waiting[segment] += more
        self._bytes_of[process] += more * self._stride(segment)
        if not self._waiting[segment]:
            del self._waiting[segment], self._since[segment]
        if not self._bytes_of[process]:
            del self._bytes_of[process]

    def defer(self, writer: Writer, refs: Iterable[bytes], now: float) -> None:
        """``writer`` may still be copying into ``refs``."""
        for ref in refs:
            segment = PageRef.unpack(ref).segment
            self._of.setdefault(writer, {}).setdefault(segment, set()).add(ref)
            self._since.setdefault(segment, now)
            self._count(writer, segment, 1)

    def stopped(self, writer: Writer, still: Collection[bytes] = ()) -> int:
        """``writer`` writes into ``still`` at most; how many slots are free for that."""
        free: list[bytes] = []
        for segment in list(self._of.get(writer, ())):
            free += self._take_out(writer, segment, still)
        for ref in free:
            self._slots.give_back(ref)
        return len(free)

    def _take_out(self, writer: Writer, segment: int, still: Collection[bytes] = ()) -> set[bytes]:
        """The slots of ``segment`` that wait for ``writer`` no longer: all but ``still``."""
        mine = self._of[writer]
        refs = mine.pop(segment, set())
        gone = refs.difference(still)
        if left := refs - gone:
            mine[segment] = left
        if not mine:
            del self._of[writer]
        if gone:
            self._count(writer, segment, -len(gone))
        return gone

    def quarantine(self, ref: bytes) -> None:
        self._quarantined.add(ref)

    def drop_segment(self, number: int) -> None:
        """The memory of a segment goes: what lies there is given back, whoever may still write into it."""
        gone = self._quarantined_in(number)
        self._quarantined.difference_update(gone)
        for writer in list(self._of):
            gone += self._take_out(writer, number)
        for ref in gone:
            # Should the node end before the memory is replaced, the next one has to wait for the writers again.
            self._slots.give_back(ref, told=False)

    def _quarantined_in(self, segment: int) -> list[bytes]:
        return [ref for ref in self._quarantined if PageRef.unpack(ref).segment == segment]

    def overdue(self, now: float) -> list[tuple[int, int]]:
        """Segments with slots that have waited for :data:`REPLACE_SECONDS`, and how many wait, the most first."""
        for segment, since in self._since.items():
            self._since[segment] = min(since, now)  # the clock may have been set back
        return [one for one in self._waiting.most_common() if self._since[one[0]] <= now - REPLACE_SECONDS]

    def fills(self, segment: int) -> bool:
        """Whether all slots of ``segment`` that are out wait for their writers, or are not used again."""
        idle = len(self._quarantined_in(segment)) + self._waiting[segment]
        return idle == self._slots.segments[segment].used

    def segments(self) -> set[int]:
        """The segments with slots that wait for their writers, or that are not used again."""
        return {*self._since, *(PageRef.unpack(ref).segment for ref in self._quarantined)}
