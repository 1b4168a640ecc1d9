"""Finds a slot for one more page: a free one, a fresh segment, another namespace's, or an evicted page's.

What always holds: no page leaves that is leased, being written, or the prefix of a page that stays; a
namespace takes from another only what the other has beyond its fair share, or what it no longer uses; a tenant's
quota is kept (:mod:`ems.pool.tenants.shares`), and memory that another tenant may have mapped is replaced first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from ems.pool.core.changes import ChangeLog
from ems.pool.core.eviction import evict, evict_segment, oldest_segment
from ems.pool.core.index import Page
from ems.pool.core.namespaces import NamespacePages
from ems.pool.reasons.departures import NOBODY, Departures
from ems.pool.reasons.words import Reason
from ems.pool.segments.layout import Geometry, PageRef, carve
from ems.pool.tenants.shares import Held, Shares

if TYPE_CHECKING:
    from ems.pool.core.space import Segment, Space

EVICTION_STEP = 1024
"""Most pages that one call evicts at a time, so that no caller waits for a long pass."""

AHEAD = 3
"""Evictions' worth of pages before the first eviction at which tiers are offered what would leave."""


class Outcome(IntEnum):
    """What became of one key of a reservation."""

    GRANTED = 0
    PRESENT = 1
    WRITING = 2
    NO_SPACE = 3
    NOT_TOUCHED = 4


class Assigned(msgspec.Struct, frozen=True):
    """Effect: segment ``segment`` is now carved for ``namespace`` as ``geometry``; describe it.

    Its slots begin with the generation ``generation``.  With ``renewed`` its memory is another tenant's and is to be
    replaced before.
    """

    segment: int
    namespace: str
    geometry: Geometry
    generation: int
    renewed: bool = False


class Holdings(Protocol):
    """What may not leave."""

    def held(self, namespace: NamespacePages) -> Iterable[Page]:
        """Pages of ``namespace`` that are leased, being written or pinned."""

    def resting(self) -> Collection[int]:
        """Segments with slots that wait for a cut-off writer to end."""


class Room:
    """The slots of all namespaces, and who gives way to whom."""

    def __init__(
        self,
        space: Space,
        namespaces: Sequence[NamespacePages],
        holdings: Holdings,
        changes: ChangeLog,
        departures: Departures,
        *,
        high_watermark: float,
        eviction_ratio: float,
    ) -> None:
        self._space = space
        self._changes = changes
        self._departures = departures
        self._holdings = holdings
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self._namespaces = namespaces
        self.shares = Shares()
        self.evicted = 0

    def take(self, namespace: NamespacePages, now: float, assigned: list[Assigned]) -> PageRef | Outcome:
        """A slot for a new page of ``namespace``, or why there is none; segments carved for it join ``assigned``."""
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        if self._space.untouched(namespace.number) and self._unassigned(namespace) is None:
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
        if self._fresh(namespace) is not None or self._space.untouched(namespace.number):
            return False
        if not namespace.denied and self._who_gives_way(namespace, namespace.last_used) is not None:
            # It is short of its share and grows by a segment before it gives up a page of its own.
            return False
        namespace.debt = max(int(self._eviction_ratio * capacity), 1)
        return True

    def leaving_soon(self, namespace: NamespacePages) -> int:
        """How many pages the next few evictions take; 0 while ``namespace`` is farther from its capacity than that."""
        capacity = self._space.capacity(namespace.number)
        nearly = (self._high_watermark - AHEAD * self._eviction_ratio) * capacity
        if capacity == 0 or self._space.used(namespace.number) < nearly:
            return 0
        return max(int(AHEAD * self._eviction_ratio * capacity), 1) + namespace.debt

    def spare(self, namespace: NamespacePages) -> tuple[int, int]:
        """How many pages of ``namespace`` find room without that any page has to leave for them.

        First in its own segments, then in these and segments that nobody has (with quotas: in the next one of these).
        """
        number, size = namespace.number, namespace.page_size
        capacity, used, fresh = self._space.capacity(number), self._space.used(number), self._fresh(namespace)
        more = capacity
        if fresh is not None:
            free = [one for one in self._space.segments if one.owner is None and one.room_for(size)]
            more += sum(carve(one.size, size).slot_count for one in ([fresh] if self.shares.limited else free))
        return max(int(self._high_watermark * capacity) - used, 0), max(int(self._high_watermark * more) - used, 0)

    def trim(self, namespace: NamespacePages) -> None:
        """Free the eviction ratio of all slots of a namespace that must be trimmed, one step at a call."""
        evicted = self._evict(namespace, min(namespace.debt, EVICTION_STEP), Reason.EVICTED_WATERMARK)
        namespace.debt = namespace.debt - evicted if evicted else 0

    def _make(self, namespace: NamespacePages, now: float, assigned: list[Assigned]) -> None:
        segment = self._fresh(namespace) or self._idle(namespace) or self._taken_from_another(namespace, now)
        if segment is None:
            batch = int(self._eviction_ratio * self._space.capacity(namespace.number))
            self._evict(namespace, max(1, min(batch, EVICTION_STEP)), Reason.EVICTED_FULL)
            return
        loser = segment.owner
        renewed = segment.tenant not in (None, namespace.tenant)
        if renewed:
            self._space.renew(segment)
        geometry = self._space.assign(segment, namespace.number, namespace.page_size, namespace.tenant)
        for changed in {namespace.number, namespace.number if loser is None else loser}:
            self._namespaces[changed].index.policy.resize(self._space.capacity(changed))
        assigned.append(Assigned(segment.number, namespace.name, geometry, segment.generations[0], renewed))

    def _fresh(self, namespace: NamespacePages) -> Segment | None:
        """A segment without a namespace, if this one's tenant may have another."""
        segment = self._unassigned(namespace)
        if segment is None or not self.shares.limited:
            return segment
        held = Held(self._namespaces, self._space.segments)
        return segment if self.shares.may_grow(namespace.tenant, held.bytes[namespace.tenant], segment.size) else None

    def _unassigned(self, namespace: NamespacePages) -> Segment | None:
        return self._space.unassigned(namespace.page_size, namespace.tenant)

    def _idle(self, namespace: NamespacePages) -> Segment | None:
        """A segment of another namespace that holds nothing, if it may change hands."""
        if not self.shares.limited:
            return self._space.idle_of_others(namespace.number, namespace.page_size)
        held = Held(self._namespaces, self._space.segments)

        def allowed(segment: Segment) -> bool:
            assert segment.owner is not None
            tenant, other = namespace.tenant, self._namespaces[segment.owner].tenant
            return tenant == other or (
                self._space.settled(segment)
                and self.shares.may_grow(tenant, held.bytes[tenant], segment.size)
                and self.shares.spares(other, held.bytes[other], segment.size)
            )

        return self._space.idle_of_others(namespace.number, namespace.page_size, allowed)

    def _evict(self, namespace: NamespacePages, count: int, reason: Reason) -> int:
        let_go = partial(self.let_go, namespace, reason.code, NOBODY)
        evicted = evict(namespace.index, count, let_go, namespace.kept)
        self.evicted += evicted
        return evicted

    def let_go(self, namespace: NamespacePages, code: int, winner: int, page: Page) -> None:
        """``page`` was taken out of the index by the reason ``code``, for ``winner``: its slot is free."""
        self._space.give_back(PageRef.unpack(page.ref))
        self._departures.note(namespace.number, page.key, code, winner)
        if self._changes.recording():
            self._changes.removed(namespace.name, page.key)

    def _taken_from_another(self, namespace: NamespacePages, now: float) -> Segment | None:
        """Evict all pages of one segment of the namespace that has most, the segment longest unused first."""
        other = None if namespace.denied else self._who_gives_way(namespace, now)
        if other is None:
            return None
        foreign = other.tenant != namespace.tenant
        useless = [
            segment.number
            for segment in self._space.segments
            if not segment.room_for(namespace.page_size) or (foreign and not self._space.settled(segment))
        ]
        number = self._emptied(other, useless, Reason.EVICTED_FOR_OTHERS, namespace.number)
        if number is None:
            namespace.denied = True
            return None
        return self._space.segments[number]

    def _emptied(
        self, namespace: NamespacePages, useless: Iterable[int], reason: Reason, other: int = NOBODY
    ) -> int | None:
        """Evict all pages of the segment of ``namespace`` that was unused for longest and is not among ``useless``."""
        occupied = {*useless, *self._holdings.resting()}
        number = oldest_segment(namespace.index, self._holdings.held(namespace), occupied)
        if number is not None:
            self.evicted += evict_segment(namespace.index, number, partial(self.let_go, namespace, reason.code, other))
        return number

    def _who_gives_way(self, namespace: NamespacePages, now: float) -> NamespacePages | None:
        return self.shares.who_gives_way(namespace, self._namespaces, self._space.segments, now)

    def shrink(self) -> list[int]:
        """Take a segment from each tenant that has more than it may have; their memory is to be replaced."""
        if not self.shares.limited:
            return []
        held = Held(self._namespaces, self._space.segments)
        taken = []
        for tenant, has in held.bytes.items():
            if not self.shares.excess(tenant, has):
                continue
            segment = self._given_up(tenant, held)
            if segment is not None and segment.owner is not None:
                loser = segment.owner
                self._space.renew(segment)
                self._namespaces[loser].index.policy.resize(self._space.capacity(loser))
                taken.append(segment.number)
        return taken

    def _given_up(self, tenant: str, held: Held) -> Segment | None:
        """An empty segment of ``tenant``, or one that is emptied for that."""
        mine = [one for one in self._namespaces if one.tenant == tenant and held.counts[one.number]]
        numbers = {one.number for one in mine}
        unsettled = [one.number for one in self._space.segments if one.closing or not self._space.settled(one)]
        for segment in self._space.segments:
            if segment.owner in numbers and segment.used == 0 and segment.number not in unsettled:
                return segment
        for one in sorted(mine, key=lambda one: (-held.counts[one.number], one.last_used)):
            number = self._emptied(one, unsettled, Reason.EVICTED_QUOTA)
            if number is not None:
                return self._space.segments[number]
        return None
