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
from ems.pool.layout import PageRef
from ems.pool.writer import Writer

REPLACE_SECONDS = 30.0
"""How long writers may take to say that they stopped before the memory of their slots is replaced."""


class DeferredFrees:
    """Slots of ``slots`` by where they lie (packed): deferred ones of each writer, and quarantined ones."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._of: dict[Writer, set[bytes]] = {}
        self._quarantined: set[bytes] = set()
        self._bytes: Counter[Hashable] = Counter()
        """Of the slots that wait for each process."""
        self._in_segment: Counter[int] = Counter()
        self._since: dict[int, float] = {}
        """Since when slots of each segment wait."""

    @property
    def resting(self) -> int:
        return self._in_segment.total()

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
        return self._bytes[process]

    @property
    def bytes_in(self) -> dict[int, int]:
        """Bytes of the slots of each segment that wait for their writers."""
        return {number: count * self._stride(number) for number, count in self._in_segment.items()}

    def _stride(self, segment: int) -> int:
        geometry = self._slots.segments[segment].geometry
        return geometry.slot_stride if geometry else 0

    def defer(self, writer: Writer, refs: Iterable[bytes], now: float) -> None:
        """``writer`` may still be copying into ``refs``."""
        for ref in refs:
            self._of.setdefault(writer, set()).add(ref)
            segment = PageRef.unpack(ref).segment
            self._in_segment[segment] += 1
            self._since.setdefault(segment, now)
            self._bytes[writer.process] += self._stride(segment)

    def stopped(self, writer: Writer, still: Collection[bytes] = ()) -> int:
        """``writer`` writes into ``still`` at most; how many slots are free for that."""
        free = self._of.get(writer, set()).difference(still)
        self._forget(writer, free)
        for ref in free:
            self._slots.give_back(PageRef.unpack(ref))
        return len(free)

    def _forget(self, writer: Writer, refs: Collection[bytes]) -> None:
        if refs:
            self._of[writer].difference_update(refs)
            if not self._of[writer]:
                del self._of[writer]
        for ref in refs:
            segment = PageRef.unpack(ref).segment
            self._in_segment[segment] -= 1
            if not self._in_segment[segment]:
                del self._in_segment[segment], self._since[segment]
            self._bytes[writer.process] -= self._stride(segment)
            if not self._bytes[writer.process]:
                del self._bytes[writer.process]

    def quarantine(self, ref: bytes) -> None:
        self._quarantined.add(ref)

    def drop_segment(self, begin: bytes) -> None:
        """The memory where ``begin`` says goes: what lies there is given back, whoever may still write into it."""
        gone = [ref for ref in self._quarantined if ref.startswith(begin)]
        self._quarantined.difference_update(gone)
        for writer, waiting in list(self._of.items()):
            inside = [ref for ref in waiting if ref.startswith(begin)]
            self._forget(writer, inside)
            gone += inside
        for ref in gone:
            # Should the node end before the memory is replaced, the next one has to wait for the writers again.
            self._slots.give_back(PageRef.unpack(ref), told=False)

    def overdue(self, now: float) -> list[tuple[int, int]]:
        """Segments with slots that have waited for :data:`REPLACE_SECONDS`, and how many wait, the most first."""
        for segment, since in self._since.items():
            self._since[segment] = min(since, now)  # the clock may have been set back
        return [one for one in self._in_segment.most_common() if self._since[one[0]] <= now - REPLACE_SECONDS]

    def fills(self, segment: int) -> bool:
        """Whether all slots of ``segment`` that are out wait for their writers, or are not used again."""
        inside = sum(PageRef.unpack(ref).segment == segment for ref in self._quarantined)
        return inside + self._in_segment[segment] == self._slots.segments[segment].used

    def segments(self) -> set[int]:
        """The segments with slots that wait for their writers, or that are not used again."""
        return {*self._in_segment, *(PageRef.unpack(ref).segment for ref in self._quarantined)}
