"""The brain of a pool node: every decision about pages, and nothing else.

It knows no socket, no memory and no clock.  Each verb takes who asks and what time it is, and answers with
what is to be done: headers to write, segments to describe.  What always holds, and tests
look for: a key has at most one page; a page becomes readable only by its writer's commit; a leased page
stays where it is; whoever disappears holds nothing any more; every slot is in exactly one place.

Its parts are used directly by whoever needs one; what several of them have to agree on is a verb of
:mod:`~ems.pool.core.writing`, :mod:`~ems.pool.core.reading` or of the whole brain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import msgspec

from ems.config import DEFAULT_POLICY, PolicyName
from ems.errors import PoolRefused
from ems.pool.core.changes import ChangeLog
from ems.pool.core.deferred_frees import DeferredFrees
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages, Namespaces
from ems.pool.core.pins import MAX_PIN_SECONDS, PINNED_SHARE, Announcements
from ems.pool.core.reading import Reading
from ems.pool.core.reclaim import Reclaimer
from ems.pool.core.reservations import LIMITS, Reservations, UncommittedLimits
from ems.pool.core.shares import Quota
from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.core.writing import Writing
from ems.pool.keys import Tail
from ems.pool.layout import PageRef, Writer, refs_begin, writer_of
from ems.pool.names import tenant_of
from ems.pool.pages import Page
from ems.pool.reasons.eviction_log import CAPACITY, NOBODY
from ems.pool.reasons.misses import MissReasons
from ems.pool.reasons.words import Reason
from ems.pool.segments.recovery import Recovered

LEFT_AT_ONCE = 256
"""Pages that who leaves gives up in one step; a lease ends at once, whatever its length."""


class Counters(msgspec.Struct):
    """What happened since the node started."""

    lookups: int = 0
    keys_looked_up: int = 0
    keys_hit: int = 0
    tails_hit: int = 0
    pages_committed: int = 0
    pages_aborted: int = 0
    refused_no_space: int = 0
    refused_not_touched: int = 0
    refused_draining: int = 0
    already_present: int = 0
    already_writing: int = 0
    leases_lost: int = 0
    reservations_lost: int = 0
    reservations_expired: int = 0
    refused_share: int = 0
    pages_corrupt: int = 0
    corrupt_unconfirmed: int = 0
    prefetch_hints: int = 0


class PoolCore:
    """All that a node decides: what its parts do by themselves, and what takes several of them.

    ``client_id`` is a number that stands for one connection of a client.  ``ids`` gives the numbers of leases and
    reservations, each another one; None counts them.  ``notes`` are the keys of which it is remembered why they left.
    """

    def __init__(
        self,
        segment_sizes: list[int],
        *,
        high_watermark: float = 0.95,
        eviction_ratio: float = 0.05,
        policy: PolicyName = DEFAULT_POLICY,
        changes: ChangeLog | None = None,
        ids: Iterator[int] | None = None,
        limits: UncommittedLimits = LIMITS,
        notes: int = CAPACITY,
    ) -> None:
        self.now = 0.0
        self.slots = SlotAllocator(segment_sizes)
        self.namespaces = Namespaces(policy)
        self.changes = changes or ChangeLog()
        self.reasons = MissReasons(self.namespaces.pages_of, notes)
        self.leases = Leases()
        self.reservations = Reservations()
        self.deferred = DeferredFrees(self.slots)
        self.announcements = Announcements()
        self.reclaimer = Reclaimer(self, high_watermark=high_watermark, eviction_ratio=eviction_ratio)
        self.shares = self.reclaimer.shares
        self.counters = Counters()
        self.writers: dict[int, Writer] = {}
        """Who writes through a connection, where that is known."""
        self.pending_deletes: set[Page] = set()
        """Pages that leave as soon as nobody reads them and nothing hangs on them; not found any more."""
        self.draining = False
        """Whether nothing new is taken in."""
        self._ids = ids or count(1)
        self.writing = Writing(self, limits)
        self.reading = Reading(self)

    def new_id(self) -> int:
        return next(self._ids)

    def writer(self, client_id: int) -> Writer:
        """Who writes through a connection; one of its own where nobody was introduced."""
        return self.writers.get(client_id) or writer_of(client_id)

    def page(self, namespace: int, key: bytes) -> Page | None:
        return self.namespaces[namespace].index.get(key)

    def segment_tenant(self, segment: int) -> str | None:
        """The tenant whose pages ``segment`` holds; None when there is no such segment or nobody has it."""
        if not 0 <= segment < len(self.slots.segments):
            return None
        number = self.slots.segments[segment].namespace
        return None if number is None else self.namespaces[number].tenant

    def drop_unwritten(self, namespace: NamespacePages, page: Page) -> bytes:
        """Forget ``page``, whose writer does not commit it; where it lies, into which that may still be copying."""
        ref = page.ref
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1
        self.reasons.eviction_log.note(namespace.number, page.key, Reason.UNFINISHED.code)
        return ref

    # What was damaged

    def page_at(self, namespace: int, key: bytes, ref: bytes) -> Page | None:
        """The present page of ``key`` if it still lies at ``ref``, in that generation."""
        page = self.namespaces.opened(namespace).index.get(key)
        return page if page is not None and page.present and page.ref == ref else None

    def quarantine(self, namespace: int, page: Page) -> None:
        """The bytes of a present page are wrong: nobody finds it any more, and its slot is not used again.

        Leases on it promise it no longer; their holders see from its header that it is gone.
        """
        ns = self.namespaces.opened(namespace)
        self.leases.break_off(page)
        self.deferred.quarantine(page.ref)
        self.reasons.eviction_log.note(namespace, page.key, Reason.CHECKSUM.code)
        if self.changes.recording():
            self.changes.removed(ns.name, page.key)
        ns.index.discard(page)
        self.counters.pages_corrupt += 1

    def drop_segment(self, segment: int) -> int:
        """``segment`` is not what it was any more: all that lay there is gone, whoever holds it; none of it is out.

        Leases promise its pages no longer, and what was to be written there cannot be committed.  Returns how many
        pages could be read before.
        """
        number = self.slots.segments[segment].namespace
        if number is None:
            return 0
        self.settle()
        ns, begin = self.namespaces[number], refs_begin(segment)
        for page in self.reservations.drop_segment(ns, begin):
            self.slots.give_back(self.drop_unwritten(ns, page))
        lost = [page for page in ns.index if page.ref.startswith(begin)]
        for page in lost:
            self.leases.break_off(page)
        ns.pins.unpin([page.key for page in lost])
        for page in lost:
            self.pending_deletes.discard(page)
            self.reclaimer.let_go(ns, Reason.CHECKSUM.code, NOBODY, page)
            ns.index.discard(page)
        self.counters.pages_corrupt += len(lost)
        self.deferred.drop_segment(segment)
        return len(lost)

    # What was put off

    @property
    def unsettled(self) -> bool:
        """Whether :meth:`settle_some` has something to do."""
        return self.leases.unsettled or self.announcements.unsettled

    def settle_some(self) -> None:
        """Do a bounded part of what was put off: uses of leased pages, keys that are awaited or not any more."""
        self.leases.settle_some(self.now)
        self.announcements.settle_some()

    def settle(self) -> None:
        while self.unsettled:
            self.settle_some()

    # Namespaces and memory

    def open_namespace(self, name: str, page_size: int) -> int:
        """The number of the namespace ``name`` whose pages are ``page_size`` bytes, made if it is new.

        Raises:
            NoSpace: no segment can ever hold such a page.
            PoolRefused: the namespace exists with another page size, or the name is unfit, or there are too many.
            QuotaExceeded: its tenant may not have a single segment.
        """
        known = self.namespaces.named(name)
        if known is not None:
            if known.page_size != page_size:
                raise PoolRefused(
                    f"namespace {name} has pages of {known.page_size} bytes, but {page_size} were asked for; "
                    "the layout fingerprint must change whenever the page size does"
                )
            return known.number
        largest = max((segment.size for segment in self.slots.segments), default=0)
        self.namespaces.refuse_unfit(name, page_size, largest)
        self.shares.refuse_if_too_small(tenant_of(name), largest)
        return self.namespaces.add(name, page_size, self.now).number

    def adopt(self, recovered: Recovered, tails: Iterable[tuple[str, bytes, bytes, Tail]], now: float) -> None:
        """Begin with what an earlier node left, whose memory was touched as the slots were told before.

        ``tails`` are namespace, key, place and tokens of blocks that are not full; those of other pages do not matter.
        """
        self.now = now
        for left in recovered.namespaces:
            ns = self.namespaces.add(left.name, left.page_size, self.now)
            ns.index.policy.resize(len(left.pages))
            ns.index.restore(left.pages)
            for back in ns.index:
                back.used = now
        numbers = {ns.name: ns.number for ns in self.namespaces}
        for segment in recovered.segments:
            slots = [PageRef.unpack(ref).slot for ref in segment.resting]
            out = segment.present + slots
            self.slots.adopt(segment.number, numbers[segment.namespace], segment.page_size, segment.generations, out)
            for ref, writer in zip(segment.resting, segment.writers, strict=True):
                self.deferred.defer(writer, [ref], now)
        for ns in self.namespaces:
            ns.index.policy.resize(self.slots.capacity(ns.number))
        for name, key, ref, tail in tails:
            listing = self.namespaces.named(name)
            page = listing.index.get(key) if listing is not None else None
            if listing is not None and page is not None and page.ref == ref and page.tail is None:
                listing.index.list_tail(page, tail)

    def adopt_pins(self, pinned: Mapping[str, Mapping[bytes, float]]) -> None:
        """Go on with what an earlier node had ``pinned``, by namespace and until when, as far as it is there.

        All of it, also where the namespace has fewer segments than it had when the pins were made.
        """
        for name, pins in pinned.items():
            known = self.namespaces.named(name)
            if known is not None:
                for key, until in pins.items():
                    self._pin(known, [key], until, len(pins))

    def pinned(self) -> dict[str, dict[bytes, float]]:
        return {ns.name: dict(ns.pins.pinned) for ns in self.namespaces if ns.pins.pinned}

    def pages(self) -> int:
        return sum(len(namespace.index) - namespace.writing for namespace in self.namespaces)

    def has_tail(self, name: str, key: bytes, ref: bytes) -> bool:
        """Whether the page of ``key`` in the namespace ``name`` lies at ``ref`` and is found by its tokens."""
        known = self.namespaces.named(name)
        page = known.index.get(key) if known is not None else None
        return page is not None and page.ref == ref and page.tail is not None

    def find_namespace(self, name: str) -> int:
        """The number of the namespace ``name``, -1 when nobody has stored anything in one of that name."""
        known = self.namespaces.named(name)
        return -1 if known is None else known.number

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Tenants have ``quotas`` from now on, and whoever has none nothing.

        Raises ConfigError: their guaranteed minima do not fit in the pool together; nothing has changed then.
        """
        self.shares.set(quotas, [segment.size for segment in self.slots.segments])

    def named(self, namespace: int) -> tuple[str, int]:
        known = self.namespaces.opened(namespace)
        return known.name, known.page_size

    # What stays by request

    def announce(self, client_id: int, namespace: int, keys: list[bytes], now: float) -> int:
        """A request of ``client_id`` waits and will ask for ``keys``: they stay while anything else can leave.

        Returns the number of the announcement, which ends by being withdrawn, with ``client_id``, or after a time.
        """
        number = self.new_id()
        self.announcements.announce(number, client_id, self.namespaces.opened(namespace).pins, keys, now)
        return number

    def pin(self, namespace: int, keys: list[bytes], until: float) -> int:
        """Those of ``keys`` that are present stay until then.

        Returns how many: pins cover half a namespace at most.
        """
        ns = self.namespaces.opened(namespace)
        return self._pin(ns, keys, until, int(PINNED_SHARE * self.slots.capacity(namespace)))

    def _pin(self, ns: NamespacePages, keys: list[bytes], until: float, most: int) -> int:
        known = [key for key in keys if (page := ns.index.get(key)) is not None and page.present]
        return ns.pins.pin(known, min(until, self.now + MAX_PIN_SECONDS), most)

    # Clients and time

    def disconnect(self, client_id: int, now: float, *, alive: bool) -> None:
        """``client_id`` is gone and holds nothing any more.

        When its process is ``alive`` it may still be copying into slots that it reserved, so nobody else gets these
        before it has stopped.
        """
        for _ in self.leave(client_id, now, alive=alive):
            pass

    def leave(self, client_id: int, now: float, *, alive: bool) -> Iterator[int]:
        """What :meth:`disconnect` does, in steps; how much work each was, in pages."""
        self.now = now
        self.reasons.tick(now)
        self.announcements.leave(client_id)
        work = 0
        for number in self.leases.of(client_id):
            work += len(self.leases.all[number].pages) + 1
            self.reading.release(client_id, number)
            self.counters.leases_lost += 1
            if work >= LEFT_AT_ONCE:
                yield work
                work = 0
        writer, resting = self.writer(client_id), list[bytes]()
        for number in self.reservations.of(client_id):
            self.counters.reservations_lost += 1
            namespace = self.reservations.get(client_id, number).namespace
            while number in self.reservations.all:
                pages = self.reservations.take_back(client_id, number, LEFT_AT_ONCE)
                resting += [self.drop_unwritten(namespace, page) for page in pages]
                work += len(pages) + 1
                if work >= LEFT_AT_ONCE:
                    self.deferred.defer(writer, resting, now)
                    yield work
                    work, resting = 0, []
        self.writers.pop(client_id, None)
        self.deferred.defer(writer, resting, now)
        if not alive:
            self.deferred.stopped(writer)

    def tick(self, now: float) -> None:
        """Time went by: settle, continue an eviction that was cut short."""
        self.now = now
        self.settle_some()
        self.changes.tick(now)
        self.reasons.tick(now)
        self.announcements.tick(now)
        self.writing.expire()
        for namespace in self.namespaces:
            namespace.denied = False
            namespace.pins.tick(now)
            if self.reclaimer.must_trim(namespace):
                self.reclaimer.trim(namespace)

    def stats(self) -> dict[str, object]:
        segments = self.slots.segments
        return {
            "bytes_total": sum(segment.size for segment in segments),
            "bytes_touched": sum(segment.touched for segment in segments),
            "bytes_used": sum(s.used * s.geometry.slot_stride for s in segments if s.geometry),
            "segments": sum(segment.size > 0 for segment in segments),
            "segments_assigned": sum(segment.namespace is not None for segment in segments),
            "leases": len(self.leases),
            "pinned": sum(len(namespace.pins.pinned) for namespace in self.namespaces),
            "reservations": len(self.reservations),
            "bytes_reserved": self.reservations.by_tenant.total(),
            "slots_quarantined": self.deferred.quarantined,
            "slots_resting": self.deferred.resting,
            "namespaces": self.rows(range(len(self.namespaces))),
            "counters": {**msgspec.to_builtins(self.counters), "pages_evicted": self.reclaimer.evicted},
            "misses": self.reasons.misses,
            "draining": self.draining,
        }

    def rows(self, numbers: Iterable[int]) -> list[dict[str, object]]:
        return [
            {
                "name": ns.name,
                "page_size": ns.page_size,
                "pages": len(ns.index) - ns.writing,
                "writing": ns.writing,
                "capacity": self.slots.capacity(ns.number),
            }
            for ns in (self.namespaces[number] for number in numbers)
        ]
