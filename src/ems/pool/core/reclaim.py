"""Finds a slot for one more page: a free one, a fresh segment, another namespace's, or an evicted page's.

What always holds: no page leaves that is leased, being written, or the prefix of a page that stays; a
namespace takes from another only what the other has beyond its fair share, or what it no longer uses; a tenant's
quota is kept (:mod:`ems.pool.core.shares`), and memory that another tenant may have mapped is replaced first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from ems.pool.core.eviction import evict, evict_segment, oldest_segment, segments_of
from ems.pool.core.shares import SegmentUsage, Shares
from ems.pool.layout import carve
from ems.pool.pages import Assigned, Outcome, Page
from ems.pool.reasons.eviction_log import NOBODY
from ems.pool.reasons.words import Reason

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.core.slot_allocator import Segment

EVICTION_STEP = 1024
"""Most pages that one call evicts at a time, so that no caller waits for a long pass."""

DEFERRED_SHARE = 0.25
"""How much of the pool may wait for cut-off writers before pages leave for that."""

AHEAD = 3
"""Evictions' worth of pages before the first eviction at which tiers are offered what would leave."""


class Reclaimer:
    """The slots of all namespaces, and who gives way to whom."""

    def __init__(self, state: PoolCore, *, high_watermark: float, eviction_ratio: float) -> None:
        self._slots = state.slots
        self._namespaces = state.namespaces
        self._leases = state.leases
        self._reservations = state.reservations
        self._deferred = state.deferred
        self._changes = state.changes
        self._eviction_log = state.reasons.eviction_log
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self.shares = Shares()
        self.evicted = 0

    def take(
        self, namespace: NamespacePages, count: int, now: float, assigned: list[Assigned]
    ) -> tuple[list[bytes], Outcome | None]:
        """Slots for ``count`` new pages of ``namespace``, packed references, or some of them and why there are no more.

        Segments carved for that join ``assigned``.
        """
        taken = self._slots.take(namespace.number, count)
        while len(taken) < count:
            if self._slots.untouched(namespace.number) and self._unassigned(namespace) is None:
                return taken, Outcome.NOT_TOUCHED
            self._make(namespace, now, assigned)
            more = self._slots.take(namespace.number, count - len(taken))
            if not more:
                return taken, Outcome.NOT_TOUCHED if self._slots.untouched(namespace.number) else Outcome.NO_SPACE
            taken += more
        return taken, None

    def must_trim(self, namespace: NamespacePages) -> bool:
        """Whether ``namespace`` is above the high watermark with no segment to grow by, or not done with trimming."""
        if namespace.debt:
            return True
        capacity = self._slots.capacity(namespace.number)
        if self._slots.used(namespace.number) <= self._high_watermark * capacity:
            return False
        if self._fresh(namespace) is not None or self._slots.untouched(namespace.number):
            return False
        if self._idle(namespace) is not None:
            return False
        if not namespace.denied and self._donor(namespace, namespace.last_used) is not None:
            # It is short of its share and grows by a segment before it gives up a page of its own.
            return False
        namespace.debt = max(int(self._eviction_ratio * capacity), 1)
        return True

    def leaving_soon(self, least: int) -> Iterator[tuple[int, Iterator[Page]]]:
        """Of each namespace that has to evict soon, the pages that would leave, the first first, ``least`` or more.

        They are read as they are asked for, and only until the core is told anything else.
        """
        for namespace in self._namespaces:
            capacity = self._slots.capacity(namespace.number)
            soon = AHEAD * self._eviction_ratio * capacity
            if not capacity or self._slots.used(namespace.number) < self._high_watermark * capacity - soon:
                continue
            # Others may take a segment each at any moment.
            if namespace.debt or self._unowned() < len(self._namespaces) or self.spare(namespace)[1] <= soon:
                next_evictions = max(int(soon), 1) + namespace.debt
                yield namespace.number, islice(namespace.index.policy, max(least, next_evictions))

    def spare(self, namespace: NamespacePages) -> tuple[int, int]:
        """How many pages of ``namespace`` find room without that any page has to leave for them.

        First in its own segments, then in these and segments that nobody has (with quotas: in the next one of these).
        """
        number, size = namespace.number, namespace.page_size
        capacity, used, fresh = self._slots.capacity(number), self._slots.used(number), self._fresh(namespace)
        more = capacity
        if fresh is not None:
            free = [one for one in self._slots.segments if one.namespace is None and one.room_for(size)]
            more += sum(carve(one.size, size).slot_count for one in ([fresh] if self.shares.limited else free))
        return max(int(self._high_watermark * capacity) - used, 0), max(int(self._high_watermark * more) - used, 0)

    def idle_room(self, namespace: NamespacePages) -> int:
        """How many pages of ``namespace`` that nobody asked for find room now, and none has to leave for them.

        First in its own segments, then in one that nobody has where each other namespace finds one after it; nowhere
        while memory that it could have is being touched.
        """
        number = namespace.number
        if self._slots.untouched(number):
            return 0
        capacity = self._slots.capacity(number)
        if self._unowned() >= len(self._namespaces) and (fresh := self._fresh(namespace)) is not None:
            capacity += carve(fresh.size, namespace.page_size).slot_count
        return max(int(self._high_watermark * capacity) - self._slots.used(number), 0)

    def _unowned(self) -> int:
        """How many segments are there that no namespace has."""
        return sum(one.namespace is None and not one.closing for one in self._slots.segments if one.size)

    def trim(self, namespace: NamespacePages) -> None:
        """Free the eviction ratio of all slots of a namespace that must be trimmed, one step at a call."""
        evicted = self._evict(namespace, min(namespace.debt, EVICTION_STEP), Reason.EVICTED_WATERMARK)
        namespace.debt = namespace.debt - evicted if evicted else 0

    def _make(self, namespace: NamespacePages, now: float, assigned: list[Assigned]) -> None:
        segment = self._fresh(namespace) or self._idle(namespace) or self._taken_from_another(namespace, now)
        if segment is None:
            batch = int(self._eviction_ratio * self._slots.capacity(namespace.number))
            self._evict(namespace, max(1, min(batch, EVICTION_STEP)), Reason.EVICTED_FULL)
            return
        loser = segment.namespace
        renewed = segment.tenant not in (None, namespace.tenant) or segment.stale
        if renewed:
            self._slots.renew(segment)
        geometry = self._slots.assign(segment, namespace.number, namespace.page_size, namespace.tenant)
        self._resized(namespace.number, loser)
        assigned.append(Assigned(segment.number, namespace.name, geometry, segment.generations[0], renewed))

    def _fresh(self, namespace: NamespacePages) -> Segment | None:
        """A segment without a namespace, if this one's tenant may have another."""
        segment = self._unassigned(namespace)
        if segment is None or not self.shares.limited:
            return segment
        usage = SegmentUsage(self._namespaces, self._slots.segments)
        return segment if self.shares.may_grow(namespace.tenant, usage.bytes[namespace.tenant], segment.size) else None

    def _unassigned(self, namespace: NamespacePages) -> Segment | None:
        return self._slots.unassigned(namespace.page_size, namespace.tenant)

    def _idle(self, namespace: NamespacePages) -> Segment | None:
        """A segment of another namespace none of whose slots is out and that has room, if it may change hands."""
        usage = SegmentUsage(self._namespaces, self._slots.segments)
        tenant, size = namespace.tenant, namespace.page_size
        for segment in self._slots.segments:
            number = segment.namespace
            if number is None or number == namespace.number or segment.used or not segment.room_for(size):
                continue
            other = self._namespaces[number].tenant
            if tenant == other or (
                self._slots.settled(segment)
                and self.shares.may_grow(tenant, usage.bytes[tenant], segment.size)
                and self.shares.may_donate(other, usage.bytes[other], segment.size)
            ):
                return segment
        return None

    def _evict(self, namespace: NamespacePages, count: int, reason: Reason) -> int:
        let_go = partial(self.let_go, namespace, reason.code, NOBODY)
        evicted = evict(namespace.index, count, let_go, namespace.pins)
        self.evicted += evicted
        return evicted

    def let_go(self, namespace: NamespacePages, code: int, winner: int, page: Page) -> None:
        """``page`` was taken out of the index by the reason ``code``, for ``winner``: its slot is free."""
        self._slots.give_back(page.ref)
        self._eviction_log.note(namespace.number, page.key, code, winner)
        if self._changes.recording():
            self._changes.removed(namespace.name, page.key)

    def _taken_from_another(self, namespace: NamespacePages, now: float) -> Segment | None:
        """Evict all pages of one segment of the namespace that has most, the segment longest unused first."""
        other = None if namespace.denied else self._donor(namespace, now)
        if other is None:
            return None
        foreign = other.tenant != namespace.tenant
        useless = [
            segment.number
            for segment in self._slots.segments
            if not segment.room_for(namespace.page_size) or (foreign and not self._slots.settled(segment))
        ]
        number = self._emptied(other, useless, Reason.EVICTED_FOR_OTHERS, namespace.number)
        namespace.denied = number is None
        return None if number is None else self._slots.segments[number]

    def _emptied(
        self, namespace: NamespacePages, useless: Iterable[int], reason: Reason, other: int = NOBODY
    ) -> int | None:
        """Evict all pages of the segment of ``namespace`` that was unused for longest and is not among ``useless``.

        One into which a cut-off writer may still write comes last: its memory has to be replaced.
        """
        resting, segments = self._deferred.segments(), self._slots.segments
        number = oldest_segment(namespace.index, self._held(namespace), {*useless, *resting})
        if number is None and resting:
            unsettled = (one.number for one in segments if not self._slots.settled(one))
            number = oldest_segment(namespace.index, self._held(namespace), {*useless, *unsettled})
        if number is not None:
            self._empty(namespace, number, reason, other)
        return number

    def _empty(self, namespace: NamespacePages, segment: int, reason: Reason, other: int = NOBODY) -> None:
        self.evicted += evict_segment(namespace.index, segment, partial(self.let_go, namespace, reason.code, other))
        if segment in self._deferred.segments():
            self._deferred.drop_segment(segment)
            self._slots.segments[segment].stale = True

    def replace(self, now: float) -> int | None:
        """A segment whose memory is to be replaced now, because slots of it wait for their writers for long.

        More such slots are in it than others, or all that wait come to :data:`DEFERRED_SHARE` of the pool.  All its
        pages leave.
        """
        many = sum(self._deferred.bytes_in.values()) > DEFERRED_SHARE * self._slots.total
        for number, count in self._deferred.overdue(now):
            segment = self._slots.segments[number]
            if segment.namespace is None or segment.closing or not self._slots.settled(segment):
                continue
            namespace = self._namespaces[segment.namespace]
            if (many or 2 * count >= segment.used) and number not in segments_of(self._held(namespace)):
                self._empty(namespace, number, Reason.EVICTED_FULL)
                self.renew(segment)
                return number
        return None

    def renew(self, segment: Segment) -> None:
        """``segment``, none of whose slots is out, has no namespace any more, and its memory is to be replaced."""
        loser = segment.namespace
        self._slots.renew(segment)
        self._resized(loser)

    def lose(self, number: int) -> None:
        """The memory of segment ``number``, none of whose slots is out, is not there: nobody has it for now."""
        loser = self._slots.segments[number].namespace
        self._slots.lose(number)
        self._resized(loser)

    def _resized(self, *numbers: int | None) -> None:
        for number in {number for number in numbers if number is not None}:
            self._namespaces[number].index.policy.resize(self._slots.capacity(number))

    def _held(self, namespace: NamespacePages) -> Iterator[Page]:
        """Pages of ``namespace`` that are leased, being written or pinned."""
        yield from filter(None, map(namespace.index.get, namespace.pins.pinned))
        yield from chain.from_iterable(self._leases.held(namespace))
        yield from self._reservations.waiting(namespace)

    def _donor(self, namespace: NamespacePages, now: float) -> NamespacePages | None:
        return self.shares.donor(namespace, self._namespaces, self._slots.segments, now)

    def shrink(self) -> list[int]:
        """Take a segment from each tenant that has more than it may have; their memory is to be replaced."""
        if not self.shares.limited:
            return []
        usage = SegmentUsage(self._namespaces, self._slots.segments)
        taken = []
        for tenant in [tenant for tenant, has in usage.bytes.items() if has > self.shares.bounds(tenant).cap]:
            segment = self._segment_to_take(tenant, usage)
            if segment is not None and segment.namespace is not None:
                self.renew(segment)
                taken.append(segment.number)
        return taken

    def _segment_to_take(self, tenant: str, usage: SegmentUsage) -> Segment | None:
        """An empty segment of ``tenant``, or one that is emptied for that."""
        mine = [one for one in self._namespaces if one.tenant == tenant and usage.counts[one.number]]
        numbers = {one.number for one in mine}
        unsettled = [one.number for one in self._slots.segments if one.closing or not self._slots.settled(one)]
        for segment in self._slots.segments:
            if segment.namespace in numbers and segment.used == 0 and segment.number not in unsettled:
                return segment
        for one in sorted(mine, key=lambda one: (-usage.counts[one.number], one.last_used)):
            number = self._emptied(one, unsettled, Reason.EVICTED_QUOTA)
            if number is not None:
                return self._slots.segments[number]
        return None
