"""The brain of a pool node: every decision about pages, and nothing else.

It knows no socket, no memory and no clock.  Each verb takes who asks and what time it is, and answers with
what is to be done: headers to write, segments to describe.  What always holds, and :meth:`PoolCore.check`
verifies: a key has at most one page; a page becomes readable only by its writer's commit; a leased page
stays where it is; whoever disappears holds nothing any more; every slot is in exactly one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice, repeat, takewhile
from math import inf

import msgspec

from ems.config import DEFAULT_POLICY, PolicyName
from ems.errors import PoolRefused
from ems.pool.core.answers import Begun, Committed, Counters, Found, Holder, Reserved
from ems.pool.core.changes import ChangeLog
from ems.pool.core.deferred_frees import DeferredFrees
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages, Namespaces, refuse_other_size
from ems.pool.core.pins import MAX_PIN_SECONDS, PINNED_SHARE, Announcements
from ems.pool.core.quota import Quota
from ems.pool.core.reclaim import Reclaimer
from ems.pool.core.reservations import Reservations
from ems.pool.core.shares import Shares
from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.core.uncommitted import LIMITS, UncommittedLimits
from ems.pool.keys import Tail
from ems.pool.layout import REF_BYTES, PageRef, refs_begin
from ems.pool.names import tenant_of
from ems.pool.pages import Assigned, Outcome, Page
from ems.pool.protocol.messages import Explained
from ems.pool.reasons.eviction_log import NOBODY
from ems.pool.reasons.misses import MissReasons
from ems.pool.reasons.requests import Look
from ems.pool.reasons.words import Reason
from ems.pool.segments.recovery import Recovered
from ems.pool.writer import UNKNOWN, Writer, writer_of

LEFT_AT_ONCE = 256
"""Pages that who leaves gives up in one step; a lease ends at once, whatever its length."""
MAX_NOTED = 256
"""Most keys of one refused reservation whose refusal is remembered."""

_REFUSALS = {
    Outcome.NO_SPACE: Reason.REFUSED_NO_SPACE,
    Outcome.NOT_TOUCHED: Reason.REFUSED_NOT_TOUCHED,
    Outcome.OVER_SHARE: Reason.REFUSED_SHARE,
}
"""Outcomes that are remembered; the counters have the names of these reasons."""


class PoolCore:
    """All state of a node.  ``client_id`` is a number that stands for one connection of a client.

    ``ids`` gives the numbers of leases and reservations, each another one; None counts them.
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
    ) -> None:
        self._slots = SlotAllocator(segment_sizes)
        self._namespaces = Namespaces(policy)
        self.changes = changes or ChangeLog()
        self.reasons = MissReasons(self.pages_of)
        self._reclaimer = Reclaimer(
            self._slots,
            self._namespaces,
            self,
            self.changes,
            self.reasons.eviction_log,
            high_watermark=high_watermark,
            eviction_ratio=eviction_ratio,
        )
        self._now = 0.0
        self._reservations = Reservations()
        self._limits = limits
        self._leases = Leases()
        self._deferred = DeferredFrees(self._slots)
        self._next_id = 1
        self._ids = ids
        self._announcements = Announcements()
        self._writers: dict[int, Writer] = {}
        """Who writes through a connection, where that is known."""
        self._pending_deletes: set[Page] = set()
        """Pages that leave as soon as nobody reads them and nothing hangs on them; not found any more."""
        self.draining = False
        """Whether nothing new is taken in."""
        self.counters = Counters()

    # Namespaces and memory

    def open_namespace(self, name: str, page_size: int) -> int:
        """The number of the namespace ``name`` whose pages are ``page_size`` bytes, made if it is new.

        Raises:
            NoSpace: no segment can ever hold such a page.
            PoolRefused: the namespace exists with another page size, or the name is unfit, or there are too many.
            QuotaExceeded: its tenant may not have a single segment.
        """
        known = self._namespaces.named(name)
        if known is not None:
            refuse_other_size(known, page_size)
            return known.number
        largest = max((segment.size for segment in self._slots.segments), default=0)
        self._namespaces.refuse_unfit(name, page_size, largest)
        self._reclaimer.shares.refuse_if_too_small(tenant_of(name), largest)
        return self._namespaces.add(name, page_size, self._now).number

    def adopt(
        self,
        recovered: Recovered,
        tails: Iterable[tuple[str, bytes, bytes, Tail]],
        now: float,
    ) -> None:
        """Begin with what an earlier node left, whose memory was touched as :meth:`touched` was told before.

        ``tails`` are namespace, key, place and tokens of blocks that are not full; those of other pages do not matter.
        """
        self._now = now
        for left in recovered.namespaces:
            ns = self._namespaces.add(left.name, left.page_size, self._now)
            ns.index.policy.resize(len(left.pages))
            ns.index.restore(left.pages)
            for back in ns.index:
                back.used = now
        numbers = {ns.name: ns.number for ns in self._namespaces}
        for segment in recovered.segments:
            slots = [PageRef.unpack(ref).slot for ref in segment.resting]
            out = segment.present + slots
            self._slots.adopt(segment.number, numbers[segment.namespace], segment.page_size, segment.generations, out)
            for ref, writer in zip(segment.resting, chain(segment.writers, repeat(UNKNOWN)), strict=False):
                self._deferred.defer(writer, [ref], now)
        for ns in self._namespaces:
            ns.index.policy.resize(self._slots.capacity(ns.number))
        for name, key, ref, tail in tails:
            listing = self._namespaces.named(name)
            page = listing.index.get(key) if listing is not None else None
            if listing is not None and page is not None and page.ref == ref and page.tail is None:
                listing.index.list_tail(page, tail)

    def adopt_pins(self, pinned: Mapping[str, Mapping[bytes, float]]) -> None:
        """Go on with what an earlier node had ``pinned``, by namespace and until when, as far as it is there.

        All of it, also where the namespace has fewer segments than it had when the pins were made.
        """
        for name, pins in pinned.items():
            known = self._namespaces.named(name)
            if known is not None:
                for until, keys in _by_time(pins).items():
                    self._pin(known, keys, until, len(pins))

    def pinned(self) -> dict[str, dict[bytes, float]]:
        """What is pinned, by namespace and until when."""
        return {ns.name: dict(ns.pins.pinned) for ns in self._namespaces if ns.pins.pinned}

    def held_by_clients(self) -> bool:
        """Whether a client, not a tier, has a lease or a reservation."""
        held = self._leases.all.values(), self._reservations.all.values()
        return any(one.client_id > 0 for holders in held for one in holders)

    def pages(self) -> int:
        """How many pages can be read."""
        return sum(len(namespace.index) - namespace.writing for namespace in self._namespaces)

    def has_tail(self, name: str, key: bytes, ref: bytes) -> bool:
        """Whether the page of ``key`` in the namespace ``name`` lies at ``ref`` and is found by its tokens."""
        known = self._namespaces.named(name)
        page = known.index.get(key) if known is not None else None
        return page is not None and page.ref == ref and page.tail is not None

    def freed(self) -> set[tuple[int, int]]:
        """Segment and number of the slots that came free since the last call: their headers vouch for nothing now."""
        return self._slots.freed()

    def find_namespace(self, name: str) -> int:
        """The number of the namespace ``name``, -1 when nobody has stored anything in one of that name."""
        known = self._namespaces.named(name)
        return -1 if known is None else known.number

    def pages_of(self, name: str) -> int:
        """How many pages the namespace ``name`` has, written or not; 0 when it is not there."""
        known = self._namespaces.named(name)
        return 0 if known is None else len(known.index)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Tenants have ``quotas`` from now on, and whoever has none nothing; see :meth:`shrink`.

        Raises:
            ConfigError: their guaranteed minima do not fit in the pool together; nothing has changed then.
        """
        self._reclaimer.shares.set(quotas, [segment.size for segment in self._slots.segments])

    @property
    def shares(self) -> Shares:
        """The tenants' quotas in this pool."""
        return self._reclaimer.shares

    def shrink(self) -> list[int]:
        """Segments that tenants above their quota lose now, at most one each; their memory is to be replaced."""
        return self._reclaimer.shrink()

    def touched(self, segment: int, touched: int) -> None:
        """The first ``touched`` bytes of ``segment`` were touched and may be handed out."""
        self._slots.touch(segment, touched)

    def touching_ended(self) -> None:
        """No more memory will be touched; the pool is as large as what was touched by now."""
        self._slots.touching_ended()

    # Writing

    def refuse_unfit_tail(self, namespace: int, key: bytes, tail: Tail) -> None:
        """Refuse a tail that would cost the node more than the page costs the pool, or that is not the page's.

        Raises:
            PoolRefused: it has more tokens than a page can hold, or its page has another ``key``.
        """
        size = self._namespaces.opened(namespace).page_size
        if len(tail.tokens) > size:
            raise PoolRefused(
                f"a tail of {len(tail.tokens)} bytes of tokens, expected at most the {size} bytes of a page"
            )
        if key != tail.key:
            raise PoolRefused(
                f"the last key is {key.hex()}, expected {tail.key.hex()}, the hash of the tail's directory and tokens"
            )

    def reserve(
        self,
        client_id: int,
        namespace: int,
        parent: bytes,
        keys: list[bytes],
        tail: Tail | None = None,
        begun: Begun | None = None,
    ) -> Reserved:
        """Promise slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        With ``tail`` the last of them is not full and can be found by its tokens.  They go on what was ``begun``, if
        anything was.

        Raises:
            StaleReference: what was begun is gone.
        """
        ns = self._namespaces.opened(namespace)
        begun = begun or Begun()
        if self.draining:
            return self._refuse_all(ns, keys, begun.reservation)
        ns.last_used = self._now
        self.settle_some()
        waiting: dict[int, Page] = {}
        outcomes = bytearray(len(keys))
        granted: list[Page] = []
        assigned: list[Assigned] = []
        refusal = begun.refusal
        spared: list[contextlib.ExitStack] = []
        before, most = parent, self._may_reserve(client_id, ns)
        for position, key in enumerate(keys):
            known = ns.index.get(key)
            if known is not None:
                outcomes[position] = Outcome.PRESENT if known.present else Outcome.WRITING
            else:
                # What follows a block that found no room is of no use without it, and would look in vain again.
                ref = refusal or self._take(ns, parent, keys, assigned, spared, most - len(granted))
                if isinstance(ref, Outcome):
                    outcomes[position] = refusal = ref
                else:
                    page = ns.index.insert(key, ref.pack(), before)
                    ns.writing += 1
                    waiting[begun.count + position] = page
                    granted.append(page)
                    if tail is not None and position == len(keys) - 1:
                        ns.index.list_tail(page, tail)
            before = key
        for stack in spared:
            stack.close()
        self._count_refusals(ns, keys, outcomes)
        number = self._wait_for(client_id, ns, begun.reservation, waiting)
        if self._reclaimer.must_trim(ns):
            with self._spared(ns, parent, keys):
                self._reclaimer.trim(ns)
        return Reserved(number, bytes(outcomes), granted, assigned, ns.page_size)

    def _wait_for(self, client_id: int, namespace: NamespacePages, number: int, pages: dict[int, Page]) -> int:
        """Reserve ``pages``, by position, as part of reservation ``number`` if there is one; its number."""
        if number:
            self._reservations.add(client_id, number, pages)
        elif pages:
            number = self._new_id()
            self._promise(number, client_id, namespace, pages)
        return number

    def _refuse_all(self, namespace: NamespacePages, keys: list[bytes], reservation: int) -> Reserved:
        """Say of all that is not there that there is no room; why, is remembered."""
        outcomes = bytearray(len(keys))
        refused = []
        for position, key in enumerate(keys):
            known = namespace.index.get(key)
            if known is None:
                refused.append(key)
                outcomes[position] = Outcome.NO_SPACE
            else:
                outcomes[position] = Outcome.PRESENT if known.present else Outcome.WRITING
        self.counters.refused_draining += len(refused)
        for key in refused[:MAX_NOTED]:
            self.reasons.eviction_log.note(namespace.number, key, Reason.REFUSED_DRAINING.code)
        return Reserved(reservation, bytes(outcomes), [], [], namespace.page_size)

    def _promise(self, number: int, client_id: int, namespace: NamespacePages, waiting: dict[int, Page]) -> None:
        if client_id > 0:
            process, until = self.writer(client_id).process, self._now + self._limits.seconds
            self._reservations.promise(number, client_id, namespace, waiting, process=process, until=until)
        else:  # tiers bound what they fetch, and end it themselves
            self._reservations.promise(number, client_id, namespace, waiting)

    def _may_reserve(self, client_id: int, namespace: NamespacePages) -> float:
        """How many more pages of ``namespace`` a client may hold without having committed them."""
        if client_id <= 0:
            return inf
        tenant, page, process = namespace.tenant, namespace.page_size, self.writer(client_id).process
        bounds = self._reclaimer.shares.bounds(tenant)
        pool = self._slots.total if bounds is None else min(bounds.cap, self._slots.total)
        mine = self._reservations.bytes_of(process) + self._deferred.bytes_of(process)
        together = self._reservations.bytes_of_tenant(tenant)
        if self._deferred.resting:
            together += sum(
                size for number, size in self._deferred.bytes_in.items() if self.segment_tenant(number) == tenant
            )
        left = min(self._limits.of_process(pool, page) - mine, self._limits.of_tenant(pool, page) - together)
        return left // page

    def _take(
        self,
        namespace: NamespacePages,
        parent: bytes,
        keys: list[bytes],
        assigned: list[Assigned],
        spared: list[contextlib.ExitStack],
        left: float,
    ) -> PageRef | Outcome:
        if left <= 0:
            return Outcome.OVER_SHARE
        ref = self._slots.take(namespace.number)
        if ref is not None:
            return ref
        if not spared:  # once for all keys, however often pages have to leave for them
            spared.append(contextlib.ExitStack())
            spared[0].enter_context(self._spared(namespace, parent, keys))
        return self._reclaimer.take(namespace, self._now, assigned)

    @contextlib.contextmanager
    def _spared(self, namespace: NamespacePages, parent: bytes, keys: list[bytes]) -> Iterator[None]:
        """Pages of a reservation, and its prefix, do not make room for each other."""
        pages = [page for page in map(namespace.index.get, (parent, *keys)) if page is not None]
        for page in pages:
            page.leases += 1
        yield
        for page in pages:
            page.leases -= 1

    def commit(self, client_id: int, reservation: int, positions: list[int] | None = None) -> Committed:
        """The pages at ``positions`` (all, when None) of ``reservation`` are written whole: publish them.

        Raises:
            StaleReference: the reservation is not ``client_id``'s or is gone, or has not all of these pages to
                commit; nothing is published then.
        """
        ns, wanted, published = self._reservations.take(client_id, reservation, positions)
        ns.index.publish(published)
        for page in published:
            page.used = self._now
        ns.writing -= len(published)
        if self.changes.recording():
            self.changes.stored(ns.name, [page.key for page in published])
        self.counters.pages_committed += len(published)
        return Committed(published, wanted, ns.name, ns.page_size)

    def written(self, client_id: int, reservation: int, positions: Sequence[int] | None) -> list[int]:
        """The ``positions`` (all, when None) of ``reservation`` that are to be committed, in their order.

        Raises:
            StaleReference: as :meth:`commit` does.
        """
        return self._reservations.written(client_id, reservation, positions)

    def refresh(self, pages: Sequence[Page], namespace: str) -> None:
        """What hangs on ``pages`` was stored after them: they are used as recently."""
        known = self._namespaces.named(namespace)
        here = [page for page in pages if page.present]
        if known is not None and here:
            known.index.policy.refresh(here)

    def abort(self, client_id: int, reservation: int, most: int | None = None) -> bool:
        """Give back what of ``reservation`` was not committed, ``most`` pages of it; whether some are left.

        Raises:
            StaleReference: the reservation is not ``client_id``'s or is gone.
        """
        namespace = self._reservations.get(client_id, reservation).namespace
        for page in self._reservations.take_back(client_id, reservation, most):
            self._slots.give_back(PageRef.unpack(self._drop_unwritten(namespace, page)))
        return reservation in self._reservations.all

    def _drop_unwritten(self, namespace: NamespacePages, page: Page) -> bytes:
        ref = page.ref
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1
        self.reasons.eviction_log.note(namespace.number, page.key, Reason.UNFINISHED.code)
        return ref

    def _count_refusals(self, namespace: NamespacePages, keys: list[bytes], outcomes: bytearray) -> None:
        self.counters.already_present += outcomes.count(Outcome.PRESENT)
        self.counters.already_writing += outcomes.count(Outcome.WRITING)
        for outcome, reason in _REFUSALS.items():
            refused = outcomes.count(outcome)
            if not refused:
                continue
            name = reason.value
            setattr(self.counters, name, getattr(self.counters, name) + refused)
            for key in islice(compress(keys, (one == outcome for one in outcomes)), MAX_NOTED):
                self.reasons.eviction_log.note(namespace.number, key, reason.code)

    # Reading

    def lookup(self, client_id: int, namespace: int, keys: list[bytes], *, lease: bool, request: str = "") -> Found:
        """The pages of the longest present prefix of ``keys``, looked for by the engine's ``request``.

        With ``lease`` they are promised to ``client_id`` and count as used (see :meth:`settle`); without, the
        call leaves no trace but in the figures.
        """
        ns = self._namespaces.opened(namespace)
        pages = ns.index.leading(keys)
        if self._pending_deletes:
            pages = list(takewhile(lambda page: page not in self._pending_deletes, pages))
        pending = code = 0
        missing = b""
        if len(pages) < len(keys):
            missing = keys[len(pages)]
            pending = ns.index.pending(keys, len(pages))
            code = self.reasons.missed(ns.number, ns.name, ns.index, missing)
        self.counters.lookups += 1
        self.counters.keys_looked_up += len(keys)
        self.counters.keys_hit += len(pages)
        number = self._lease(client_id, ns, pages) if lease and pages else 0
        if request:
            self.reasons.requests.looked(request, Look(ns.name, len(keys), len(pages), code, missing, self._now))
        return Found(pages, pending, number, code)

    def lookup_tail(self, client_id: int, namespace: int, tail: Tail, *, lease: bool) -> tuple[int, Found]:
        """How many leading tokens of ``tail`` a page of its directory holds, and that page, as :meth:`lookup` does."""
        ns = self._namespaces.opened(namespace)
        page, shared, pending = ns.index.find_tail(tail)
        if page is None or page in self._pending_deletes:
            return 0, Found([], int(pending), 0)
        self.counters.tails_hit += 1
        number = self._lease(client_id, ns, [page]) if lease else 0
        return shared, Found([page], int(pending), number)

    def missed_namespace(self, name: str, asked: int, request: str = "") -> int:
        """``asked`` keys were to be looked up in the namespace ``name``, which is not there; why, as a code."""
        self.counters.lookups += 1
        self.counters.keys_looked_up += asked
        code = self.reasons.missed_namespace(name)
        if request:
            self.reasons.requests.looked(request, Look(name, asked, 0, code, b"", self._now))
        return code

    def _lease(self, client_id: int, namespace: NamespacePages, pages: list[Page]) -> int:
        self._leases.refuse_too_many(client_id, namespace, len(pages))
        number = self._new_id()
        namespace.last_used = self._now
        self._leases.promise(number, client_id, namespace, pages, use=True)
        return number

    def release(self, client_id: int, lease: int) -> None:
        """``client_id`` no longer needs what ``lease`` promised.

        Raises:
            StaleReference: the lease is not ``client_id``'s or is gone.
        """
        self.settle_some()
        self._leases.end(client_id, lease)

    # For tiers below memory

    def named(self, namespace: int) -> tuple[str, int]:
        """The name of ``namespace`` and the bytes of its pages."""
        known = self._namespaces.opened(namespace)
        return known.name, known.page_size

    def page(self, namespace: int, key: bytes) -> Page | None:
        """The page of ``key``, present or being written."""
        return self._namespaces[namespace].index.get(key)

    def hold(self, client_id: int, namespace: int, keys: Sequence[bytes]) -> tuple[int, list[Page]]:
        """Promise ``client_id`` those of ``keys`` that are present, which is no use: the lease and the pages."""
        ns = self._namespaces.opened(namespace)
        pages = [page for page in map(ns.index.get, keys) if page is not None and page.present]
        if not pages:
            return 0, []
        number = self._new_id()
        self._leases.promise(number, client_id, ns, pages, use=False)
        return number, pages

    def leased(self, client_id: int, lease: int) -> list[Page]:
        """The pages that ``lease`` still promises ``client_id``, without those that turned out corrupt."""
        return self._leases.pages(client_id, lease)

    def leaving_soon(self, least: int) -> Iterator[tuple[int, Iterator[Page]]]:
        """Of each namespace that has to evict soon, the pages that would leave, the first first, ``least`` or more.

        They are read as they are asked for, and only until the core is told anything else.
        """
        for namespace in self._namespaces:
            count = self._reclaimer.leaving_soon(namespace)
            if count:
                yield namespace.number, islice(namespace.index.policy, max(least, count))

    @property
    def unsettled(self) -> bool:
        """Whether :meth:`settle_some` has something to do."""
        return self._leases.unsettled

    def settle_some(self) -> None:
        """Record a bounded number of uses of leased pages."""
        self._leases.settle_some(self._now)

    def settle(self) -> None:
        """Record the uses of leased pages; put off so that a lookup's answer need not wait for it."""
        self._leases.settle(self._now)

    # What is broken

    def find(self, namespace: int, key: bytes, ref: bytes) -> Page | None:
        """The present page of ``key`` if it still lies at ``ref``, in that generation."""
        page = self._namespaces.opened(namespace).index.get(key)
        return page if page is not None and page.present and page.ref == ref else None

    def quarantine(self, namespace: int, page: Page) -> None:
        """The bytes of a present page are wrong: nobody finds it any more, and its slot is not used again.

        Leases on it promise it no longer; their holders see from its header that it is gone.
        """
        ns = self._namespaces.opened(namespace)
        self._leases.break_off(page)
        self._deferred.quarantine(page.ref)
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
        number = self._slots.segments[segment].namespace
        if number is None:
            return 0
        self.settle()
        ns, begin = self._namespaces[number], refs_begin(segment)
        for page in self._reservations.drop_segment(ns, begin):
            self._slots.give_back(PageRef.unpack(self._drop_unwritten(ns, page)))
        lost = [page for page in ns.index if page.ref.startswith(begin)]
        for page in lost:
            self._leases.break_off(page)
        self._drop_pages(ns, lost)
        self._deferred.drop_segment(begin)
        return len(lost)

    def _drop_pages(self, namespace: NamespacePages, pages: Sequence[Page]) -> None:
        namespace.pins.unpin([page.key for page in pages])
        for page in pages:
            self._slots.give_back(PageRef.unpack(page.ref))
            self._pending_deletes.discard(page)
            namespace.index.discard(page)
            self.reasons.eviction_log.note(namespace.number, page.key, Reason.CHECKSUM.code)
            if self.changes.recording():
                self.changes.removed(namespace.name, page.key)
        self.counters.pages_corrupt += len(pages)

    def renew(self, segment: int) -> None:
        """``segment``, none of whose slots is out, has no namespace any more, and its memory is to be replaced."""
        number = self._slots.segments[segment].namespace
        self._slots.renew(self._slots.segments[segment])
        if number is not None:
            self._namespaces[number].index.policy.resize(self._slots.capacity(number))

    # What stays by request

    def announce(self, client_id: int, namespace: int, keys: list[bytes], now: float) -> int:
        """A request of ``client_id`` waits and will ask for ``keys``: they stay while anything else can leave.

        Returns the number of the announcement, which ends by :meth:`withdraw`, with ``client_id``, or after a time.
        """
        number = self._new_id()
        self._announcements.announce(number, client_id, self._namespaces.opened(namespace).pins, keys, now)
        return number

    def withdraw(self, client_id: int, announcement: int) -> None:
        """The request of ``announcement`` waits no longer; nothing happens when it has ended already."""
        self._announcements.withdraw(client_id, announcement)

    def pin(self, namespace: int, keys: list[bytes], until: float) -> int:
        """Those of ``keys`` that are present stay until then.

        Returns how many: pins cover half a namespace at most.
        """
        ns = self._namespaces.opened(namespace)
        return self._pin(ns, keys, until, int(PINNED_SHARE * self._slots.capacity(namespace)))

    def _pin(self, ns: NamespacePages, keys: list[bytes], until: float, most: int) -> int:
        known = [key for key in keys if (page := ns.index.get(key)) is not None and page.present]
        return ns.pins.pin(known, min(until, self._now + MAX_PIN_SECONDS), most)

    def unpin(self, namespace: int, keys: list[bytes]) -> int:
        """End the pins of ``keys``; returns how many there were."""
        return self._namespaces.opened(namespace).pins.unpin(keys)

    # Clients and time

    def introduce(self, client_id: int, writer: Writer) -> None:
        """``writer`` is who writes through the connection ``client_id``, until :meth:`disconnect`."""
        self._writers[client_id] = writer

    def writer(self, client_id: int) -> Writer:
        """Who writes through a connection; one of its own where nobody was introduced."""
        return self._writers.get(client_id) or writer_of(client_id)

    def disconnect(self, client_id: int, now: float, *, alive: bool) -> None:
        """``client_id`` is gone and holds nothing any more.

        When its process is ``alive`` it may still be copying into slots that it reserved, so nobody else gets these
        before it has :meth:`stopped`.
        """
        for _ in self.leave(client_id, now, alive=alive):
            pass

    def leave(self, client_id: int, now: float, *, alive: bool) -> Iterator[int]:
        """What :meth:`disconnect` does, in steps; how much work each was, in pages."""
        self._now = now
        self.reasons.tick(now)
        self._announcements.leave(client_id)
        work = 0
        for number in self._leases.of(client_id):
            work += self._leases.length(number) + 1
            self.release(client_id, number)
            self.counters.leases_lost += 1
            if work >= LEFT_AT_ONCE:
                yield work
                work = 0
        writer, resting = self.writer(client_id), list[bytes]()
        for number in self._reservations.of(client_id):
            self.counters.reservations_lost += 1
            namespace = self._reservations.get(client_id, number).namespace
            while number in self._reservations.all:
                pages = self._reservations.take_back(client_id, number, LEFT_AT_ONCE)
                resting += [self._drop_unwritten(namespace, page) for page in pages]
                work += len(pages) + 1
                if work >= LEFT_AT_ONCE:
                    self._deferred.defer(writer, resting, now)
                    yield work
                    work, resting = 0, []
        self._writers.pop(client_id, None)
        self._deferred.defer(writer, resting, now)
        if not alive:
            self.stopped(writer)

    def awaits(self, writer: Writer) -> bool:
        """Whether ``writer`` was cut off and nobody else may write into its slots yet."""
        return self._deferred.awaits(writer)

    @property
    def awaited_writers(self) -> list[Writer]:
        """Writers that were cut off and into whose slots nobody else may write yet."""
        return self._deferred.writers

    def stopped(self, writer: Writer, still: Collection[bytes] = ()) -> int:
        """``writer``, as far as it was cut off, writes into the slots ``still`` (packed) at most; how many are free."""
        return self._deferred.stopped(writer, still)

    def replace_memory(self) -> list[int]:
        """Segments whose memory is to be replaced now, because writers that were cut off do not stop; one at most."""
        overdue = self._deferred.overdue(self._now)
        replaced = self._reclaimer.replace(overdue, self._deferred.bytes_in) if overdue else None
        return [] if replaced is None else [replaced]

    def tick(self, now: float) -> None:
        """Time went by: settle, continue an eviction that was cut short."""
        self._now = now
        self.settle_some()
        self.changes.tick(now)
        self.reasons.tick(now)
        self._announcements.tick(now)
        for number in self._reservations.expired(now, self._limits.seconds):
            held = self._reservations.all[number]
            pages = self._reservations.take_back(held.client_id, number)
            refs = [self._drop_unwritten(held.namespace, page) for page in pages]
            self._deferred.defer(self.writer(held.client_id), refs, now)
            self.counters.reservations_expired += 1
        for namespace in self._namespaces:
            namespace.denied = False
            namespace.pins.tick(now)
            if self._reclaimer.must_trim(namespace):
                self._reclaimer.trim(namespace)

    def _new_id(self) -> int:
        if self._ids is not None:
            return next(self._ids)
        number = self._next_id
        self._next_id += 1
        return number

    # What an administrator asks for

    @property
    def slots(self) -> SlotAllocator:
        """The segments and their slots."""
        return self._slots

    @property
    def namespaces(self) -> Namespaces:
        """All namespaces, in the order in which they were made."""
        return self._namespaces

    def take_out(self, namespace: NamespacePages, page: Page, reason: Reason) -> None:
        """Let ``page`` leave that is present, that nobody reads and nothing hangs on."""
        self._pending_deletes.discard(page)
        namespace.index.discard(page)
        self._reclaimer.let_go(namespace, reason.code, NOBODY, page)

    def mark_for_delete(self, page: Page) -> None:
        """From now on ``page`` is not found any more, though it is still being read."""
        self._pending_deletes.add(page)

    def unmark_delete(self, page: Page) -> None:
        """``page`` may be found again."""
        self._pending_deletes.discard(page)

    def release_unused(self, segment: int) -> None:
        """Slots of ``segment`` that are not used again may go with its memory, once no other of its slots is out."""
        if self._deferred.fills(segment):
            self.drop_deferred(segment)

    def spare(self, name: str, page_size: int) -> tuple[int, int]:
        """How many pages of the namespace ``name``, open or not, find room without that any page has to leave.

        First in its own segments, then in these and segments that nobody has.
        """
        known = self._namespaces.named(name)
        return self._reclaimer.spare(known or self._namespaces.unopened(name, page_size, self._now))

    def capacity(self, namespace: NamespacePages) -> int:
        """Slots that ``namespace`` has."""
        return self._slots.capacity(namespace.number)

    def holders(self, pages: Collection[Page]) -> list[Holder]:
        """Who reads or writes any of ``pages``."""
        found: dict[int, Holder] = {}
        promised = self._leases
        held = [(one.client_id, 1, 0, promised.pages(one.client_id, number)) for number, one in promised.all.items()]
        held += [(one.client_id, 0, 1, list(one.waiting.values())) for one in self._reservations.all.values()]
        for client_id, leases, reservations, theirs in held:
            if count := sum(page in pages for page in theirs):
                so_far = found.get(client_id, Holder(client_id, 0, 0, 0))
                found[client_id] = Holder(
                    client_id, so_far.leases + leases, so_far.reservations + reservations, so_far.pages + count
                )
        return list(found.values())

    def readers(self) -> Mapping[int, int]:
        """Leases on pages of each namespace, by its number; none are said of one without."""
        return self._leases.by_namespace()

    # What may not leave, asked by the room

    def held(self, namespace: NamespacePages) -> Iterator[Page]:
        """Pages of ``namespace`` that are leased, being written or pinned."""
        yield from filter(None, map(namespace.index.get, namespace.pins.pinned))
        yield from chain.from_iterable(self._leases.held(namespace))
        yield from self._reservations.waiting(namespace)

    def resting(self) -> Collection[int]:
        """Segments with slots that wait for a cut-off writer to stop, or that are not used any more."""
        return self._deferred.segments()

    def drop_deferred(self, segment: int) -> None:
        """Give those slots of ``segment`` back, whose memory is to be replaced."""
        self._deferred.drop_segment(refs_begin(segment))

    # Looking in

    def explain(self, name: str, keys: list[bytes]) -> Explained:
        """Why ``keys`` of the namespace ``name`` are there or not."""
        ns = self._namespaces.named(name)
        number, index = (-1, None) if ns is None else (ns.number, ns.index)
        return self.reasons.explain(number, name, index, keys, self._now, lambda one: self._namespaces[one].name)

    def stats(self) -> dict[str, object]:
        """Plain figures for status and metrics."""
        segments = self._slots.segments
        return {
            "bytes_total": sum(segment.size for segment in segments),
            "bytes_touched": sum(segment.touched for segment in segments),
            "bytes_used": sum(s.used * s.geometry.slot_stride for s in segments if s.geometry),
            "segments": len(segments),
            "segments_assigned": sum(segment.namespace is not None for segment in segments),
            "leases": len(self._leases),
            "pinned": sum(len(namespace.pins.pinned) for namespace in self._namespaces),
            "reservations": len(self._reservations),
            "bytes_reserved": self._reservations.total_bytes,
            "slots_quarantined": self._deferred.quarantined,
            "slots_resting": self._deferred.resting,
            "namespaces": self.rows(range(len(self._namespaces))),
            "counters": {**msgspec.to_builtins(self.counters), "pages_evicted": self._reclaimer.evicted},
            "misses": self.reasons.misses,
            "draining": self.draining,
        }

    def rows(self, numbers: Iterable[int]) -> list[dict[str, object]]:
        """Plain figures of single namespaces."""
        return [
            {
                "name": ns.name,
                "page_size": ns.page_size,
                "pages": len(ns.index) - ns.writing,
                "writing": ns.writing,
                "capacity": self._slots.capacity(ns.number),
            }
            for ns in (self._namespaces[number] for number in numbers)
        ]

    def know_tenants(self, tenants: Mapping[int, str], found: Iterable[int] = ()) -> None:
        """The memory of these segments has held pages of these tenants, who may still map it.

        That of the segments ``found`` was there before: where no tenant is known, anybody may have mapped it.
        """
        for number, tenant in {**dict.fromkeys(found, ""), **tenants}.items():
            if 0 <= number < len(self._slots.segments):
                self._slots.segments[number].tenant = tenant

    def lose(self, segment: int) -> None:
        """The memory of ``segment``, none of whose slots is out, could not be replaced: nobody has it for now."""
        number = self._slots.segments[segment].namespace
        self._slots.lose(segment)
        if number is not None:
            self._namespaces[number].index.policy.resize(self._slots.capacity(number))

    def segment_tenant(self, segment: int) -> str | None:
        """The tenant whose pages ``segment`` holds; None when there is no such segment or nobody has it."""
        if not 0 <= segment < len(self._slots.segments):
            return None
        number = self._slots.segments[segment].namespace
        return None if number is None else self._namespaces[number].tenant

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = self._slots.check() + self._announcements.check()
        broken += self._leases.check(self._namespaces) + self._reservations.check(self._namespaces)
        used = self._deferred.resting + self._deferred.quarantined
        for namespace in self._namespaces:
            used += len(namespace.index)
            broken += _check_pages(namespace)
        if used != sum(segment.used for segment in self._slots.segments):
            broken.append(f"{used} pages are known but other slots are out")
        return broken


def _by_time(pins: Mapping[bytes, float]) -> dict[float, list[bytes]]:
    keys: dict[float, list[bytes]] = {}
    for key, until in pins.items():
        keys.setdefault(until, []).append(key)
    return keys


def _check_pages(namespace: NamespacePages) -> list[str]:
    broken = namespace.index.check()
    present = sum(page.present for page in namespace.index)
    if present + namespace.writing != len(namespace.index):
        broken.append(f"namespace {namespace.name} does not account for all of its pages")
    broken += [f"page {page.key.hex()} lies nowhere" for page in namespace.index if len(page.ref) != REF_BYTES]
    return broken
