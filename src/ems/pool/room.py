"""Finds a slot for one more page: a free one, a fresh segment, another namespace's, or an evicted page's.

What always holds: no page leaves that is leased, being written, or the prefix of a page that stays; a
namespace takes from another only what the other has beyond its fair share, or what it no longer uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from ems.pool.changes import ChangeLog
from ems.pool.eviction import evict, evict_segment, oldest_segment
from ems.pool.index import Index, Page
from ems.pool.layout import Geometry, PageRef

if TYPE_CHECKING:
    from ems.pool.space import Segment, Space

EVICTION_STEP = 1024
"""Most pages that one call evicts at a time, so that no caller waits for a long pass."""

IDLE_SECONDS = 10.0
"""How long a namespace must have rested before it can lose its last segment to a namespace that has none."""


class Outcome(IntEnum):
    """What became of one key of a reservation."""

    GRANTED = 0
    PRESENT = 1
    WRITING = 2
    NO_SPACE = 3
    NOT_TOUCHED = 4


class Assigned(msgspec.Struct, frozen=True):
    """Effect: segment ``segment`` is now carved for ``namespace`` as ``geometry``; describe it."""

    segment: int
    namespace: str
    geometry: Geometry


class NamespacePages:
    """One namespace: its pages, how many of them are being written, when it was used last."""

    __slots__ = ("debt", "denied", "index", "last_used", "name", "number", "page_size", "writing")

    def __init__(self, number: int, name: str, page_size: int, now: float) -> None:
        self.number = number
        self.name = name
        self.page_size = page_size
        self.index = Index()
        self.writing = 0
        self.last_used = now
        self.debt = 0
        """Pages still to be evicted since the high watermark was reached."""
        self.denied = False
        """Whether no segment of another namespace could be emptied; not tried again before the next tick."""


class Holdings(Protocol):
    """What may not leave."""

    def held(self, namespace: NamespacePages) -> Iterable[Page]:
        """Pages of ``namespace`` that are leased or being written."""

    def resting(self) -> Collection[int]:
        """Segments with slots that wait for a cut-off writer to end."""


class Room:
    """The slots of all namespaces, and who gives way to whom."""

    def __init__(
        self, space: Space, holdings: Holdings, changes: ChangeLog, *, high_watermark: float, eviction_ratio: float
    ) -> None:
        self._space = space
        self._changes = changes
        self._holdings = holdings
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self._namespaces: list[NamespacePages] = []
        self.evicted = 0

    def add(self, namespace: NamespacePages) -> None:
        """``namespace`` may take part from now on."""
        self._namespaces.append(namespace)

    def take(self, namespace: NamespacePages, now: float, assigned: list[Assigned]) -> PageRef | Outcome:
        """A slot for a new page of ``namespace``, or why there is none; segments carved for it join ``assigned``."""
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        if self._space.untouched(namespace.number) and self._space.unassigned(namespace.page_size) is None:
            return Outcome.NOT_TOUCHED
        self._make(namespace, now, assigned)
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        return Outcome.NOT_TOUCHED if self._space.untouched(namespace.number) else Outcome.NO_SPACE

    def must_trim(self, namespace: NamespacePages) -> bool:
        """Whether ``namespace`` is above the high watermark with no spare segment, or not done with trimming."""
        if namespace.debt:
            return True
        capacity = self._space.capacity(namespace.number)
        if self._space.used(namespace.number) <= self._high_watermark * capacity:
            return False
        if self._space.unassigned(namespace.page_size) is not None or self._space.untouched(namespace.number):
            return False
        if not namespace.denied and self._who_gives_way(namespace, namespace.last_used) is not None:
            # It is short of its share and grows by a segment before it gives up a page of its own.
            return False
        namespace.debt = max(int(self._eviction_ratio * capacity), 1)
        return True

    def trim(self, namespace: NamespacePages) -> None:
        """Free the eviction ratio of all slots of a namespace that must be trimmed, one step at a call."""
        evicted = self._evict(namespace, min(namespace.debt, EVICTION_STEP))
        namespace.debt = namespace.debt - evicted if evicted else 0

    def _make(self, namespace: NamespacePages, now: float, assigned: list[Assigned]) -> None:
        segment = (
            self._space.unassigned(namespace.page_size)
            or self._space.idle_of_others(namespace.number, namespace.page_size)
            or self._taken_from_another(namespace, now)
        )
        if segment is None:
            batch = int(self._eviction_ratio * self._space.capacity(namespace.number))
            self._evict(namespace, max(1, min(batch, EVICTION_STEP)))
            return
        geometry = self._space.assign(segment, namespace.number, namespace.page_size)
        assigned.append(Assigned(segment.number, namespace.name, geometry))

    def _evict(self, namespace: NamespacePages, count: int) -> int:
        evicted = evict(namespace.index, count, partial(self._free, namespace))
        self.evicted += evicted
        return evicted

    def _free(self, namespace: NamespacePages, page: Page) -> None:
        self._space.give_back(PageRef.unpack(page.ref))
        if self._changes.recording():
            self._changes.removed(namespace.name, page.key)

    def _taken_from_another(self, namespace: NamespacePages, now: float) -> Segment | None:
        """Evict all pages of one segment of the namespace that has most, the segment longest unused first."""
        other = None if namespace.denied else self._who_gives_way(namespace, now)
        if other is None:
            return None
        useless = [s.number for s in self._space.segments if not s.room_for(namespace.page_size)]
        occupied = {*useless, *self._holdings.resting()}
        number = oldest_segment(other.index, self._holdings.held(other), occupied)
        if number is None:
            namespace.denied = True
            return None
        self.evicted += evict_segment(other.index, number, partial(self._free, other))
        return self._space.segments[number]

    def _who_gives_way(self, namespace: NamespacePages, now: float) -> NamespacePages | None:
        segments = Counter(segment.owner for segment in self._space.segments if segment.owner is not None)
        own = segments[namespace.number]
        owners = len(segments) + (own == 0)
        rest = [other for other in self._namespaces if other is not namespace and segments[other.number]]
        richest = max(rest, key=lambda other: (segments[other.number], -other.last_used), default=None)
        if richest is None:
            return None
        if own == 0:
            gives_way = segments[richest.number] > 1 or now - richest.last_used >= IDLE_SECONDS
        else:
            gives_way = (own + 1) * owners <= len(self._space.segments)
        return richest if gives_way else None
