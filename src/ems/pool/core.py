"""The brain of a pool node: every decision about pages, and nothing else.

It knows no socket, no memory and no clock.  Each verb takes who asks and what time it is, and answers with
what is to be done: headers to write, segments to describe.  What always holds, and :meth:`PoolCore.check`
verifies: a key has at most one page; a page becomes readable only by its writer's commit; a leased page
stays where it is; whoever disappears holds nothing any more; every slot is in exactly one place.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from ems.errors import NoSpace, PoolRefused, StaleReference
from ems.pool.eviction import evict, evict_segment
from ems.pool.index import Index, Page
from ems.pool.keys import KEY_BYTES
from ems.pool.layout import REF_BYTES, Geometry, PageRef, carve
from ems.pool.space import Segment, Space

LIMBO_SECONDS = 30.0
"""How long a slot stays unused whose writer was cut off but lives: it may still be copying into it."""

EVICTION_STEP = 1024
"""Most pages that one call evicts beyond what it needs, so that no caller waits for a long pass."""


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


class Reserved(msgspec.Struct, frozen=True):
    """Answer to a reservation: one outcome a key, and the granted pages in the order of their keys."""

    reservation: int
    outcomes: bytes
    granted: list[Page]
    assigned: list[Assigned]


class Found(msgspec.Struct, frozen=True):
    """Answer to a lookup: the leading present pages, how many keys follow being written or present, a lease."""

    pages: list[Page]
    pending: int
    lease: int

    def refs(self) -> bytes:
        """Where the pages lie, as one byte string."""
        return b"".join([page.ref for page in self.pages])


class Counters(msgspec.Struct):
    """What happened since the node started."""

    lookups: int = 0
    keys_looked_up: int = 0
    keys_hit: int = 0
    pages_committed: int = 0
    pages_evicted: int = 0
    pages_aborted: int = 0
    refused_no_space: int = 0
    refused_not_touched: int = 0
    already_present: int = 0
    already_writing: int = 0
    leases_lost: int = 0
    reservations_lost: int = 0


class _Namespace:
    __slots__ = ("index", "name", "number", "page_size", "writing")

    def __init__(self, number: int, name: str, page_size: int) -> None:
        self.number = number
        self.name = name
        self.page_size = page_size
        self.index = Index()
        self.writing = 0


class _Reservation:
    __slots__ = ("keys", "namespace", "owner", "parent", "waiting")

    def __init__(self, owner: int, namespace: _Namespace, parent: bytes, keys: list[bytes]) -> None:
        self.owner = owner
        self.namespace = namespace
        self.parent = parent
        self.keys = keys
        self.waiting: dict[int, Page] = {}


class _Lease:
    __slots__ = ("namespace", "owner", "pages")

    def __init__(self, owner: int, namespace: _Namespace, pages: list[Page]) -> None:
        self.owner = owner
        self.namespace = namespace
        self.pages = pages


def split_keys(raw: bytes) -> list[bytes]:
    """Keys that travelled as one byte string."""
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


class PoolCore:
    """All state of a node.  ``owner`` is a number that stands for one connection of a client."""

    def __init__(self, segment_sizes: list[int], *, high_watermark: float = 0.95, eviction_ratio: float = 0.05) -> None:
        self._space = Space(segment_sizes)
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self._namespaces: list[_Namespace] = []
        self._by_name: dict[str, _Namespace] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._leases: dict[int, _Lease] = {}
        self._next_id = 1
        self._limbo: dict[int, tuple[float, list[bytes]]] = {}
        self._used: list[tuple[Index, list[Page]]] = []
        self.counters = Counters()

    # Namespaces and memory

    def open_namespace(self, name: str, page_size: int) -> int:
        """The number of the namespace ``name`` whose pages are ``page_size`` bytes, made if it is new.

        Raises:
            NoSpace: no segment can ever hold such a page.
            PoolRefused: the namespace exists with another page size.
        """
        known = self._by_name.get(name)
        if known is not None:
            if known.page_size != page_size:
                raise PoolRefused(
                    f"namespace {name} has pages of {known.page_size} bytes, but {page_size} were asked for; "
                    "the layout fingerprint must change whenever the page size does"
                )
            return known.number
        largest = max((segment.size for segment in self._space.segments), default=0)
        if page_size <= 0 or carve(largest, page_size).slot_count == 0:
            raise NoSpace(
                f"a page of {page_size} bytes does not fit in a segment of {largest} bytes, "
                "start the node with a larger --size or --segment-size, or use a smaller block size"
            )
        namespace = _Namespace(len(self._namespaces), name, page_size)
        self._namespaces.append(namespace)
        self._by_name[name] = namespace
        return namespace.number

    def touched(self, segment: int, touched: int) -> None:
        """The first ``touched`` bytes of ``segment`` were touched and may be handed out."""
        self._space.touch(segment, touched)

    def touching_ended(self) -> None:
        """No more memory will be touched; the pool is as large as what was touched by now."""
        self._space.touching_ended()

    def _namespace(self, number: int) -> _Namespace:
        if not 0 <= number < len(self._namespaces):
            raise StaleReference(f"namespace {number} is not open, open it again")
        return self._namespaces[number]

    # Writing

    def reserve(self, owner: int, namespace: int, parent: bytes, keys: list[bytes]) -> Reserved:
        """Promise slots for the pages of ``keys``, consecutive blocks after the block of ``parent``."""
        space = self._namespace(namespace)
        reservation = _Reservation(owner, space, parent, keys)
        outcomes = bytearray(len(keys))
        granted: list[Page] = []
        assigned: list[Assigned] = []
        for position, key in enumerate(keys):
            known = space.index.get(key)
            if known is not None:
                outcomes[position] = Outcome.PRESENT if known.present else Outcome.WRITING
                continue
            ref = self._take(space, len(keys) - position, assigned)
            if isinstance(ref, Outcome):
                outcomes[position] = ref
                continue
            page = Page(key, ref.pack())
            space.index.insert(page)
            space.writing += 1
            reservation.waiting[position] = page
            granted.append(page)
        self._count_refusals(outcomes)
        number = 0
        if granted:
            number = self._new_id()
            self._reservations[number] = reservation
        self._trim(space)
        return Reserved(number, bytes(outcomes), granted, assigned)

    def commit(self, owner: int, reservation: int, positions: list[int] | None = None) -> list[Page]:
        """The pages at ``positions`` (all, when None) of ``reservation`` are written whole: publish them.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone.
        """
        held = self._reservation(owner, reservation)
        wanted = list(held.waiting) if positions is None else positions
        published: list[Page] = []
        index = held.namespace.index
        for position in wanted:
            page = held.waiting.pop(position, None)
            if page is None:
                raise StaleReference(f"reservation {reservation} has no page {position} to commit")
            before = held.keys[position - 1] if position else held.parent
            index.publish(page, index.get(before))
            held.namespace.writing -= 1
            published.append(page)
        for page in published:
            if not page.children:
                index.use([page])
        if not held.waiting:
            del self._reservations[reservation]
        self.counters.pages_committed += len(published)
        return published

    def namespace_of(self, owner: int, reservation: int) -> int:
        """The number of the namespace that ``owner`` reserved in.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone.
        """
        return self._reservation(owner, reservation).namespace.number

    def abort(self, owner: int, reservation: int) -> None:
        """Give back what of ``reservation`` was not committed.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone.
        """
        held = self._reservation(owner, reservation)
        del self._reservations[reservation]
        for page in held.waiting.values():
            self._drop_unwritten(held.namespace, page)
            self._space.give_back(PageRef.unpack(page.ref))

    def _reservation(self, owner: int, number: int) -> _Reservation:
        held = self._reservations.get(number)
        if held is None or held.owner != owner:
            raise StaleReference(f"reservation {number} is gone, reserve again")
        return held

    def _drop_unwritten(self, namespace: _Namespace, page: Page) -> None:
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1

    def _count_refusals(self, outcomes: bytearray) -> None:
        self.counters.already_present += outcomes.count(Outcome.PRESENT)
        self.counters.already_writing += outcomes.count(Outcome.WRITING)
        self.counters.refused_no_space += outcomes.count(Outcome.NO_SPACE)
        self.counters.refused_not_touched += outcomes.count(Outcome.NOT_TOUCHED)

    # Reading

    def lookup(self, owner: int, namespace: int, keys: list[bytes], *, lease: bool) -> Found:
        """The pages of the longest present prefix of ``keys``.

        With ``lease`` they are promised to ``owner`` and count as used (see :meth:`settle`); without, the
        call leaves no trace.
        """
        space = self._namespace(namespace)
        pages = space.index.leading(keys)
        pending = space.index.pending(keys, len(pages)) if len(pages) < len(keys) else 0
        self.counters.lookups += 1
        self.counters.keys_looked_up += len(keys)
        self.counters.keys_hit += len(pages)
        number = 0
        if lease and pages:
            number = self._new_id()
            for page in pages:
                page.leases += 1
            self._leases[number] = _Lease(owner, space, pages)
            self._used.append((space.index, pages))
        return Found(pages, pending, number)

    def release(self, owner: int, lease: int) -> None:
        """``owner`` no longer needs what ``lease`` promised.

        Raises:
            StaleReference: the lease is not ``owner``'s or is gone.
        """
        held = self._leases.get(lease)
        if held is None or held.owner != owner:
            raise StaleReference(f"lease {lease} is gone")
        self.settle()
        del self._leases[lease]
        for page in held.pages:
            page.leases -= 1

    def settle(self) -> None:
        """Record the uses of leased pages; put off so that a lookup's answer need not wait for it."""
        for index, pages in self._used:
            index.use(pages)
        self._used.clear()

    # Clients and time

    def disconnect(self, owner: int, now: float, *, alive: bool) -> None:
        """``owner`` is gone and holds nothing any more.

        When its process is ``alive`` it may still be copying into slots that it reserved, so these rest until
        :meth:`died` or for :data:`LIMBO_SECONDS` before anybody else gets them.
        """
        for number in [n for n, lease in self._leases.items() if lease.owner == owner]:
            self.release(owner, number)
            self.counters.leases_lost += 1
        resting: list[bytes] = []
        for number in [n for n, held in self._reservations.items() if held.owner == owner]:
            self.counters.reservations_lost += 1
            held = self._reservations.pop(number)
            for page in held.waiting.values():
                self._drop_unwritten(held.namespace, page)
                resting.append(page.ref)
        if resting:
            self._limbo[owner] = (now + LIMBO_SECONDS, resting)
            if not alive:
                self.died(owner)

    def resting(self) -> list[int]:
        """Owners whose slots rest because their process was alive when they left."""
        return list(self._limbo)

    def died(self, owner: int) -> None:
        """The process of ``owner`` ended: nobody writes into its slots any more."""
        _, refs = self._limbo.pop(owner, (0.0, []))
        for ref in refs:
            self._space.give_back(PageRef.unpack(ref))

    def tick(self, now: float) -> None:
        """Time went by: settle, free slots whose rest is over, continue an eviction that was cut short."""
        self.settle()
        for owner in [owner for owner, (until, _) in self._limbo.items() if until <= now]:
            self.died(owner)
        for namespace in self._namespaces:
            self._trim(namespace)

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number

    # Room

    def _take(self, namespace: _Namespace, wanted: int, assigned: list[Assigned]) -> PageRef | Outcome:
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        if self._space.untouched(namespace.number) and self._space.unassigned(namespace.page_size) is None:
            return Outcome.NOT_TOUCHED
        self._make_room(namespace, wanted, assigned)
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        return Outcome.NOT_TOUCHED if self._space.untouched(namespace.number) else Outcome.NO_SPACE

    def _make_room(self, namespace: _Namespace, wanted: int, assigned: list[Assigned]) -> None:
        segment = self._space.unassigned(namespace.page_size) or self._space.idle_of_others(namespace.number)
        if segment is None and self._below_fair_share(namespace):
            segment = self._empty_a_segment(namespace)
        if segment is not None:
            geometry = self._space.assign(segment, namespace.number, namespace.page_size)
            assigned.append(Assigned(segment.number, namespace.name, geometry))
            return
        self.settle()
        batch = int(self._eviction_ratio * self._space.capacity(namespace.number))
        self._evict(namespace, max(wanted, min(batch, EVICTION_STEP)))

    def _evict(self, namespace: _Namespace, count: int) -> None:
        evicted = evict(namespace.index, count, self._free_page)
        self.counters.pages_evicted += evicted

    def _free_page(self, page: Page) -> None:
        self._space.give_back(PageRef.unpack(page.ref))

    def _below_fair_share(self, namespace: _Namespace) -> bool:
        owners = {segment.owner for segment in self._space.segments if segment.owner is not None}
        owners.add(namespace.number)
        own = len(self._space.segments_of(namespace.number))
        return own + 1 <= len(self._space.segments) / len(owners)

    def _empty_a_segment(self, namespace: _Namespace) -> Segment | None:
        """Evict all pages of one segment of the namespace that has most, the segment longest unused first."""
        self.settle()
        richest = max(
            (other for other in self._namespaces if other is not namespace),
            key=lambda other: len(self._space.segments_of(other.number)),
            default=None,
        )
        if richest is None:
            return None
        order = list(dict.fromkeys(page.segment for page in richest.index.recency))
        for number in order:
            before = len(richest.index)
            if evict_segment(richest.index, number, self._free_page):
                self.counters.pages_evicted += before - len(richest.index)
            segment = self._space.segments[number]
            if segment.used == 0:
                return segment
        return None

    def _trim(self, namespace: _Namespace) -> None:
        """Above the high watermark, and with no spare segment, free the eviction ratio of the namespace's slots."""
        capacity = self._space.capacity(namespace.number)
        if not capacity or self._space.used(namespace.number) < self._high_watermark * capacity:
            return
        if self._space.unassigned(namespace.page_size) is not None or self._space.untouched(namespace.number):
            return
        self.settle()
        self._evict(namespace, min(max(int(self._eviction_ratio * capacity), 1), EVICTION_STEP))

    # Looking in

    def stats(self) -> dict[str, object]:
        """Plain figures for status and metrics."""
        segments = self._space.segments
        return {
            "bytes_total": sum(segment.size for segment in segments),
            "bytes_touched": sum(segment.touched for segment in segments),
            "bytes_used": sum(s.used * s.geometry.slot_stride for s in segments if s.geometry),
            "segments": len(segments),
            "segments_assigned": sum(segment.owner is not None for segment in segments),
            "leases": len(self._leases),
            "reservations": len(self._reservations),
            "slots_resting": sum(len(refs) for _, refs in self._limbo.values()),
            "namespaces": [
                {
                    "name": ns.name,
                    "page_size": ns.page_size,
                    "pages": len(ns.index) - ns.writing,
                    "writing": ns.writing,
                    "capacity": self._space.capacity(ns.number),
                }
                for ns in self._namespaces
            ],
            "counters": msgspec.to_builtins(self.counters),
        }

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = self._space.check()
        used = sum(len(refs) for _, refs in self._limbo.values())
        leases: dict[int, int] = {}
        for lease in self._leases.values():
            for page in lease.pages:
                leases[id(page)] = leases.get(id(page), 0) + 1
                if lease.namespace.index.get(page.key) is not page:
                    broken.append(f"leased page {page.key.hex()} is no longer in the pool")
        for namespace in self._namespaces:
            used += len(namespace.index)
            broken += _check_pages(namespace, leases)
        if used != sum(segment.used for segment in self._space.segments):
            broken.append(f"{used} pages are known but other slots are out")
        waiting = sum(len(held.waiting) for held in self._reservations.values())
        if waiting != sum(namespace.writing for namespace in self._namespaces):
            broken.append("a page is being written that no reservation holds")
        return broken


def _check_pages(namespace: _Namespace, leases: dict[int, int]) -> list[str]:
    broken = []
    children: dict[int, int] = {}
    for page in namespace.index:
        if page.parent is not None:
            children[id(page.parent)] = children.get(id(page.parent), 0) + 1
            if namespace.index.get(page.parent.key) is not page.parent:
                broken.append(f"the prefix of page {page.key.hex()} left before it")
        if len(page.ref) != REF_BYTES:
            broken.append(f"page {page.key.hex()} lies nowhere")
    present = sum(page.present for page in namespace.index)
    if present != namespace.index.recency.count or present + namespace.writing != len(namespace.index):
        broken.append(f"namespace {namespace.name} does not account for all of its pages")
    for page in namespace.index:
        if page.leases != leases.get(id(page), 0):
            broken.append(f"page {page.key.hex()} counts {page.leases} leases, expected {leases.get(id(page), 0)}")
        if page.children != children.get(id(page), 0):
            broken.append(f"page {page.key.hex()} counts {page.children} suffixes")
    return broken
