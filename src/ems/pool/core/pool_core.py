"""The brain of a pool node: every decision about pages, and nothing else.

It knows no socket, no memory and no clock.  Each verb takes who asks and what time it is, and answers with
what is to be done: headers to write, segments to describe.  What always holds, and :meth:`PoolCore.check`
verifies: a key has at most one page; a page becomes readable only by its writer's commit; a leased page
stays where it is; whoever disappears holds nothing any more; every slot is in exactly one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice, takewhile

import msgspec

from ems.config import DEFAULT_POLICY, PolicyName
from ems.errors import PoolRefused
from ems.pool.core.answers import Committed, Counters, Found, Reserved
from ems.pool.core.changes import ChangeLog
from ems.pool.core.handover import AnnouncementState, CoreState, NamespaceState
from ems.pool.core.index import Index, Page
from ems.pool.core.kept import MAX_PIN_SECONDS, PINNED_SHARE, Announcement, Announcements
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages, Namespaces, refuse_other_size
from ems.pool.core.reservations import Reservations
from ems.pool.core.rest import EARLIER_WRITERS, LIMBO_SECONDS, Rest
from ems.pool.core.room import Assigned, Outcome, Room
from ems.pool.core.space import Space
from ems.pool.keys import Tail, split_keys
from ems.pool.policy.experience import Experience
from ems.pool.reasons.book import Explanation, ReasonBook
from ems.pool.reasons.departures import NOBODY
from ems.pool.reasons.requests import Look
from ems.pool.reasons.words import Reason
from ems.pool.segments.layout import REF_BYTES, PageRef, refs_begin
from ems.pool.segments.recovery import Recovered
from ems.pool.tenants.names import tenant_of
from ems.pool.tenants.quota import Quota
from ems.pool.tenants.shares import Shares

MAX_NOTED = 256
"""Most keys of one refused reservation whose refusal is remembered."""

_REFUSALS = {
    Outcome.NO_SPACE: Reason.REFUSED_NO_SPACE,
    Outcome.NOT_TOUCHED: Reason.REFUSED_NOT_TOUCHED,
}
"""Outcomes that are remembered; the counters have the names of these reasons."""


class PoolCore:
    """All state of a node.  ``owner`` is a number that stands for one connection of a client.

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
    ) -> None:
        self._space = Space(segment_sizes)
        self._namespaces = Namespaces(policy)
        self.changes = changes or ChangeLog()
        self.reasons = ReasonBook(self.pages_of)
        self._room = Room(
            self._space,
            self._namespaces,
            self,
            self.changes,
            self.reasons.departures,
            high_watermark=high_watermark,
            eviction_ratio=eviction_ratio,
        )
        self._now = 0.0
        self._reservations = Reservations()
        self._leases = Leases()
        self._rest = Rest(self._space)
        self._next_id = 1
        self._ids = ids
        self._announcements = Announcements()
        self._doomed: set[Page] = set()
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
        largest = max((segment.size for segment in self._space.segments), default=0)
        self._namespaces.refuse_unfit(name, page_size, largest)
        self._room.shares.refuse_if_too_small(tenant_of(name), largest)
        return self._namespaces.add(name, page_size, self._now).number

    def adopt(
        self,
        recovered: Recovered,
        tails: Iterable[tuple[str, bytes, bytes, Tail]],
        now: float,
        known: Mapping[str, Experience] | None = None,
    ) -> int:
        """Begin with what an earlier node left, whose memory was touched as :meth:`touched` was told before.

        ``tails`` are namespace, key, place and tokens of blocks that are not full; those of other pages do not matter.
        ``known`` is what the policies had learned, by namespace; returns how many namespaces go on with it.
        """
        learned = 0
        self._now = now
        for left in recovered.namespaces:
            space = self._namespaces.add(left.name, left.page_size, self._now)
            space.index.policy.resize(len(left.pages))
            learned += space.index.restore(left.pages, known.get(left.name) if known else None)
            for back in space.index:
                back.used = now
        resting: list[bytes] = []
        numbers = {space.name: space.number for space in self._namespaces}
        for segment in recovered.segments:
            slots = [PageRef.unpack(ref).slot for ref in segment.resting]
            out = segment.present + slots
            self._space.adopt(segment.number, numbers[segment.namespace], segment.page_size, segment.generations, out)
            resting += segment.resting
        self._rest.begin(EARLIER_WRITERS, resting, now + LIMBO_SECONDS)
        for space in self._namespaces:
            space.index.policy.resize(self._space.capacity(space.number))
        for name, key, ref, tail in tails:
            listing = self._namespaces.named(name)
            page = listing.index.get(key) if listing is not None else None
            if listing is not None and page is not None and page.ref == ref and page.tail is None:
                listing.index.list_tail(page, tail)
        return learned

    def policies(self) -> list[tuple[str, Index]]:
        """Name and pages of all namespaces, those that were used last first."""
        self.settle()
        return [(ns.name, ns.index) for ns in sorted(self._namespaces, key=lambda ns: -ns.last_used)]

    def snapshot(self) -> CoreState:
        """All of it, for a node that takes over."""
        self.settle()
        segments, free = self._space.snapshot()
        numbers = {id(namespace.kept): namespace.number for namespace in self._namespaces}
        return CoreState(
            self._now,
            self._space.touching,
            segments,
            free,
            [
                NamespaceState(
                    ns.name, ns.page_size, ns.last_used, ns.debt, ns.denied, ns.index.snapshot(), ns.kept.pinned
                )
                for ns in self._namespaces
            ],
            self._reservations.snapshot(),
            self._leases.snapshot(),
            self._next_id,
            *self._rest.snapshot(),
            msgspec.to_builtins(self.counters),
            self._room.evicted,
            self.changes.snapshot(),
            self.reasons.snapshot(),
            [
                AnnouncementState(one.number, one.owner, numbers[id(one.kept)], b"".join(one.keys), one.until)
                for one in self._announcements
            ],
        )

    def resume(self, state: CoreState) -> None:
        """Go on from a :meth:`snapshot`; for a core that nothing was done with, with segments of the same sizes."""
        self._now = state.now
        self._space.resume(state.segments, state.free, touching=state.touching)
        for left in state.namespaces:
            space = self._namespaces.add(left.name, left.page_size, self._now)
            space.last_used, space.debt, space.denied = left.last_used, left.debt, left.denied
            space.kept.pinned = dict(left.pinned)
            space.index.policy.resize(self._space.capacity(space.number))
            space.index.resume(left.index)
            for page in space.index:
                page.used = state.now
            space.writing = len(space.index) - left.index.present
        self._reservations.resume(state.reservations, self._namespaces)
        self._leases.resume(state.leases, self._namespaces)
        for said in state.announcements:
            kept = self._namespaces[said.namespace].kept
            self._announcements.go_on(Announcement(said.number, said.owner, kept, split_keys(said.keys), said.until))
        self._next_id = state.next_id
        self._rest.resume(state.limbo, state.quarantined)
        self.counters = Counters(**{name: state.counters.get(name, 0) for name in Counters.__struct_fields__})
        self._room.evicted = state.evicted
        self.changes.resume(state.changes)
        if state.reasons is not None:
            self.reasons.resume(state.reasons)

    def pages(self) -> int:
        """How many pages can be read."""
        return sum(len(namespace.index) - namespace.writing for namespace in self._namespaces)

    def tails(self) -> Iterator[tuple[str, bytes, bytes, Tail]]:
        """Namespace, key, place and tokens of all blocks that are not full."""
        for namespace in self._namespaces:
            for page, tail in namespace.index.tails():
                yield namespace.name, page.key, page.ref, tail

    def freed(self) -> set[tuple[int, int]]:
        """Segment and number of the slots that came free since the last call: their headers vouch for nothing now."""
        return self._space.freed()

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
        self._room.shares.set(quotas, [segment.size for segment in self._space.segments])

    @property
    def shares(self) -> Shares:
        """The tenants' quotas in this pool."""
        return self._room.shares

    def shrink(self) -> list[int]:
        """Segments that tenants above their quota lose now, at most one each; their memory is to be replaced."""
        return self._room.shrink()

    def touched(self, segment: int, touched: int) -> None:
        """The first ``touched`` bytes of ``segment`` were touched and may be handed out."""
        self._space.touch(segment, touched)

    def touching_ended(self) -> None:
        """No more memory will be touched; the pool is as large as what was touched by now."""
        self._space.touching_ended()

    # Writing

    def reserve(
        self, owner: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Promise slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        With ``tail`` the last of them is not full and can be found by its tokens.

        Raises:
            PoolRefused: the tail has more tokens than a page can hold.
        """
        space = self._namespaces.opened(namespace)
        if tail is not None and len(tail.tokens) > space.page_size:
            # A token's state is larger than its id: this would cost the node more than the page costs the pool.
            raise PoolRefused(
                f"a tail of {len(tail.tokens)} bytes of tokens, expected at most the {space.page_size} bytes of a page"
            )
        if self.draining:
            return self._refuse_all(space, keys)
        space.last_used = self._now
        self.settle()
        waiting: dict[int, Page] = {}
        outcomes = bytearray(len(keys))
        granted: list[Page] = []
        assigned: list[Assigned] = []
        refusal: Outcome | None = None
        before = parent
        for position, key in enumerate(keys):
            known = space.index.get(key)
            if known is not None:
                outcomes[position] = Outcome.PRESENT if known.present else Outcome.WRITING
            else:
                # What follows a block that found no room is of no use without it, and would look in vain again.
                ref = refusal or self._take(space, parent, keys, assigned)
                if isinstance(ref, Outcome):
                    outcomes[position] = refusal = ref
                else:
                    page = space.index.insert(key, ref.pack(), before)
                    space.writing += 1
                    waiting[position] = page
                    granted.append(page)
                    if tail is not None and position == len(keys) - 1:
                        space.index.list_tail(page, tail)
            before = key
        self._count_refusals(space, keys, outcomes)
        number = 0
        if granted:
            number = self._new_id()
            self._reservations.promise(number, owner, space, waiting)
        if self._room.must_trim(space):
            with self._spared(space, parent, keys):
                self._room.trim(space)
        return Reserved(number, bytes(outcomes), granted, assigned, space.page_size)

    def _refuse_all(self, namespace: NamespacePages, keys: list[bytes]) -> Reserved:
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
            self.reasons.departures.note(namespace.number, key, Reason.REFUSED_DRAINING.code)
        return Reserved(0, bytes(outcomes), [], [], namespace.page_size)

    def _take(
        self, namespace: NamespacePages, parent: bytes, keys: list[bytes], assigned: list[Assigned]
    ) -> PageRef | Outcome:
        ref = self._space.take(namespace.number)
        if ref is not None:
            return ref
        with self._spared(namespace, parent, keys):
            return self._room.take(namespace, self._now, assigned)

    @contextlib.contextmanager
    def _spared(self, namespace: NamespacePages, parent: bytes, keys: list[bytes]) -> Iterator[None]:
        """Pages of a reservation, and its prefix, do not make room for each other."""
        pages = [page for page in map(namespace.index.get, (parent, *keys)) if page is not None]
        for page in pages:
            page.leases += 1
        yield
        for page in pages:
            page.leases -= 1

    def commit(self, owner: int, reservation: int, positions: list[int] | None = None) -> Committed:
        """The pages at ``positions`` (all, when None) of ``reservation`` are written whole: publish them.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone, or has not all of these pages to
                commit; nothing is published then.
        """
        space, wanted, published = self._reservations.take(owner, reservation, positions)
        space.index.publish(published)
        for page in published:
            page.used = self._now
        space.writing -= len(published)
        if self.changes.recording():
            self.changes.stored(space.name, [page.key for page in published])
        self.counters.pages_committed += len(published)
        return Committed(published, wanted, space.name, space.page_size)

    def abort(self, owner: int, reservation: int) -> None:
        """Give back what of ``reservation`` was not committed.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone.
        """
        held = self._reservations.end(owner, reservation)
        for page in held.waiting.values():
            self._space.give_back(PageRef.unpack(self._drop_unwritten(held.namespace, page)))

    def _drop_unwritten(self, namespace: NamespacePages, page: Page) -> bytes:
        ref = page.ref
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1
        self.reasons.departures.note(namespace.number, page.key, Reason.UNFINISHED.code)
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
                self.reasons.departures.note(namespace.number, key, reason.code)

    # Reading

    def lookup(self, owner: int, namespace: int, keys: list[bytes], *, lease: bool, request: str = "") -> Found:
        """The pages of the longest present prefix of ``keys``, looked for by the engine's ``request``.

        With ``lease`` they are promised to ``owner`` and count as used (see :meth:`settle`); without, the
        call leaves no trace but in the figures.
        """
        space = self._namespaces.opened(namespace)
        pages = space.index.leading(keys)
        if self._doomed:
            pages = list(takewhile(lambda page: page not in self._doomed, pages))
        pending = code = 0
        missing = b""
        if len(pages) < len(keys):
            missing = keys[len(pages)]
            pending = space.index.pending(keys, len(pages))
            code = self.reasons.missed(space.number, space.name, space.index, missing)
        self.counters.lookups += 1
        self.counters.keys_looked_up += len(keys)
        self.counters.keys_hit += len(pages)
        number = self._lease(owner, space, pages) if lease and pages else 0
        if request:
            self.reasons.requests.looked(request, Look(space.name, len(keys), len(pages), code, missing, self._now))
        return Found(pages, pending, number, code)

    def lookup_tail(self, owner: int, namespace: int, tail: Tail, *, lease: bool) -> tuple[int, Found]:
        """How many leading tokens of ``tail`` a page of its directory holds, and that page, as :meth:`lookup` does."""
        space = self._namespaces.opened(namespace)
        page, shared, pending = space.index.find_tail(tail)
        if page is None or page in self._doomed:
            return 0, Found([], int(pending), 0)
        self.counters.tails_hit += 1
        number = self._lease(owner, space, [page]) if lease else 0
        return shared, Found([page], int(pending), number)

    def missed_namespace(self, name: str, asked: int, request: str = "") -> int:
        """``asked`` keys were to be looked up in the namespace ``name``, which is not there; why, as a code."""
        self.counters.lookups += 1
        self.counters.keys_looked_up += asked
        code = self.reasons.missed_namespace(name)
        if request:
            self.reasons.requests.looked(request, Look(name, asked, 0, code, b"", self._now))
        return code

    def _lease(self, owner: int, namespace: NamespacePages, pages: list[Page]) -> int:
        number = self._new_id()
        namespace.last_used = self._now
        self._leases.promise(number, owner, namespace, pages, use=True)
        return number

    def release(self, owner: int, lease: int) -> None:
        """``owner`` no longer needs what ``lease`` promised.

        Raises:
            StaleReference: the lease is not ``owner``'s or is gone.
        """
        self.settle()
        self._leases.end(owner, lease)

    # For tiers below memory

    def named(self, namespace: int) -> tuple[str, int]:
        """The name of ``namespace`` and the bytes of its pages."""
        known = self._namespaces.opened(namespace)
        return known.name, known.page_size

    def page(self, namespace: int, key: bytes) -> Page | None:
        """The page of ``key``, present or being written."""
        return self._namespaces[namespace].index.get(key)

    def hold(self, owner: int, namespace: int, keys: Sequence[bytes]) -> tuple[int, list[Page]]:
        """Promise ``owner`` those of ``keys`` that are present, without counting as a use: the lease and the pages."""
        space = self._namespaces.opened(namespace)
        pages = [page for page in map(space.index.get, keys) if page is not None and page.present]
        if not pages:
            return 0, []
        number = self._new_id()
        self._leases.promise(number, owner, space, pages, use=False)
        return number, pages

    def leased(self, owner: int, lease: int) -> list[Page]:
        """The pages that ``lease`` promises ``owner`` still; those that turned out corrupt are no longer among them."""
        return self._leases.pages(owner, lease)

    def leaving_soon(self, least: int) -> Iterator[tuple[int, Iterator[Page]]]:
        """Of each namespace that has to evict soon, the pages that would leave, the first first, ``least`` or more.

        They are read as they are asked for, and only until the core is told anything else.
        """
        for namespace in self._namespaces:
            count = self._room.leaving_soon(namespace)
            if count:
                yield namespace.number, islice(namespace.index.policy, max(least, count))

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
        space = self._namespaces.opened(namespace)
        self.settle()
        self._leases.break_off(page)
        self._rest.quarantine(page.ref)
        self.reasons.departures.note(namespace, page.key, Reason.CHECKSUM.code)
        if self.changes.recording():
            self.changes.removed(space.name, page.key)
        space.index.discard(page)
        self.counters.pages_corrupt += 1

    def forfeit(self, segment: int) -> int:
        """``segment`` is not what it was any more: all that lay there is gone, whoever holds it; none of it is out.

        Leases promise its pages no longer, and what was to be written there cannot be committed.  Returns how many
        pages could be read before.
        """
        owner = self._space.segments[segment].owner
        if owner is None:
            return 0
        self.settle()
        space, begin = self._namespaces[owner], refs_begin(segment)
        self._leases.forfeit(space, begin)
        for page in self._reservations.forfeit(space, begin):
            self._space.give_back(PageRef.unpack(self._drop_unwritten(space, page)))
        lost = [page for page in space.index if page.ref.startswith(begin)]
        self._forfeit_pages(space, lost)
        self._rest.forfeit(begin)
        return len(lost)

    def _forfeit_pages(self, namespace: NamespacePages, pages: Sequence[Page]) -> None:
        namespace.kept.unpin([page.key for page in pages])
        for page in pages:
            self._space.give_back(PageRef.unpack(page.ref))
            self._doomed.discard(page)
            namespace.index.discard(page)
            self.reasons.departures.note(namespace.number, page.key, Reason.CHECKSUM.code)
            if self.changes.recording():
                self.changes.removed(namespace.name, page.key)
        self.counters.pages_corrupt += len(pages)

    def renew(self, segment: int) -> None:
        """``segment``, none of whose slots is out, has no namespace any more, and its memory is to be replaced."""
        owner = self._space.segments[segment].owner
        self._space.renew(self._space.segments[segment])
        if owner is not None:
            self._namespaces[owner].index.policy.resize(self._space.capacity(owner))

    # What stays by request

    def announce(self, owner: int, namespace: int, keys: list[bytes], now: float) -> int:
        """A request of ``owner`` waits and will ask for ``keys``: they stay while anything else can leave.

        Returns the number of the announcement, which ends by :meth:`withdraw`, with ``owner``, or after a time.
        """
        number = self._new_id()
        self._announcements.announce(number, owner, self._namespaces.opened(namespace).kept, keys, now)
        return number

    def withdraw(self, owner: int, announcement: int) -> None:
        """The request of ``announcement`` waits no longer; nothing happens when it has ended already."""
        self._announcements.withdraw(owner, announcement)

    def pin(self, namespace: int, keys: list[bytes], until: float) -> int:
        """Those of ``keys`` that are present stay until then.

        Returns how many: pins cover half a namespace at most.
        """
        space = self._namespaces.opened(namespace)
        known = [key for key in keys if (page := space.index.get(key)) is not None and page.present]
        most = int(PINNED_SHARE * self._space.capacity(namespace))
        return space.kept.pin(known, min(until, self._now + MAX_PIN_SECONDS), most)

    def unpin(self, namespace: int, keys: list[bytes]) -> int:
        """End the pins of ``keys``; returns how many there were."""
        return self._namespaces.opened(namespace).kept.unpin(keys)

    # Clients and time

    def disconnect(self, owner: int, now: float, *, alive: bool, rest: float = LIMBO_SECONDS) -> None:
        """``owner`` is gone and holds nothing any more.

        When its process is ``alive`` it may still be copying into slots that it reserved, so these rest until
        :meth:`died` or for ``rest`` seconds before anybody else gets them.
        """
        self._now = now
        self.reasons.tick(now)
        self._announcements.leave(owner)
        for number in self._leases.of(owner):
            self.release(owner, number)
            self.counters.leases_lost += 1
        resting: list[bytes] = []
        for number in self._reservations.of(owner):
            self.counters.reservations_lost += 1
            held = self._reservations.end(owner, number)
            resting += [self._drop_unwritten(held.namespace, page) for page in held.waiting.values()]
        self._rest.begin(owner, resting, now + rest)
        if not alive:
            self.died(owner)

    def rests(self, owner: int) -> bool:
        """Whether slots of ``owner`` rest because its process was alive when it left."""
        return self._rest.rests(owner)

    def died(self, owner: int) -> None:
        """The process of ``owner`` ended: nobody writes into its slots any more."""
        self._rest.end(owner)

    def tick(self, now: float) -> None:
        """Time went by: settle, free slots whose rest is over, continue an eviction that was cut short."""
        self._now = now
        self.settle()
        self.changes.tick(now)
        self.reasons.tick(now)
        self._rest.tick(now)
        self._announcements.tick(now)
        for namespace in self._namespaces:
            namespace.denied = False
            namespace.kept.tick(now)
            if self._room.must_trim(namespace):
                self._room.trim(namespace)

    def _new_id(self) -> int:
        if self._ids is not None:
            return next(self._ids)
        number = self._next_id
        self._next_id += 1
        return number

    # What an administrator asks for

    @property
    def space(self) -> Space:
        """The segments and their slots."""
        return self._space

    @property
    def namespaces(self) -> Namespaces:
        """All namespaces, in the order in which they were made."""
        return self._namespaces

    def take_out(self, namespace: NamespacePages, page: Page, reason: Reason) -> None:
        """Let ``page`` leave that is present, that nobody reads and nothing hangs on."""
        self._doomed.discard(page)
        namespace.index.discard(page)
        self._room.let_go(namespace, reason.code, NOBODY, page)

    def doom(self, page: Page) -> None:
        """From now on ``page`` is not found any more, though it is still being read."""
        self._doomed.add(page)

    def pardon(self, page: Page) -> None:
        """``page`` may be found again."""
        self._doomed.discard(page)

    def forgive(self, segment: int) -> None:
        """The quarantined slots of ``segment`` may go with it, once no other of its slots is out."""
        self._rest.forgive(segment)

    def spare(self, name: str, page_size: int) -> tuple[int, int]:
        """How many pages of the namespace ``name``, open or not, find room without that any page has to leave.

        First in its own segments, then in these and segments that nobody has.
        """
        known = self._namespaces.named(name)
        return self._room.spare(known or self._namespaces.unopened(name, page_size, self._now))

    def capacity(self, namespace: NamespacePages) -> int:
        """Slots that ``namespace`` has."""
        return self._space.capacity(namespace.number)

    def readers(self) -> Mapping[int, int]:
        """Leases on pages of each namespace, by its number; none are said of one without."""
        return self._leases.by_namespace()

    # What may not leave, asked by the room

    def held(self, namespace: NamespacePages) -> Iterator[Page]:
        """Pages of ``namespace`` that are leased, being written or pinned."""
        yield from filter(None, map(namespace.index.get, namespace.kept.pinned))
        yield from chain.from_iterable(self._leases.held(namespace))
        yield from self._reservations.waiting(namespace)

    def resting(self) -> Collection[int]:
        """Segments with slots that wait for a cut-off writer to end, or that are not used any more."""
        return self._rest.segments()

    # Looking in

    def explain(self, name: str, keys: list[bytes]) -> Explanation:
        """Why ``keys`` of the namespace ``name`` are there or not."""
        space = self._namespaces.named(name)
        number, index = (-1, None) if space is None else (space.number, space.index)
        codes = self.reasons.fates(number, name, index, keys)
        first = next((position for position, code in enumerate(codes) if code), None)
        if first is None:
            return Explanation(codes)
        fate = self.reasons.fate(number, name, keys[first], codes[first])
        winner = self._namespaces[fate.winner].name if fate.winner >= 0 else ""
        seconds = -1.0 if fate.since is None else max(self._now - fate.since, 0.0)
        return Explanation(codes, seconds, winner, fate.layouts)

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
            "pinned": sum(len(namespace.kept.pinned) for namespace in self._namespaces),
            "reservations": len(self._reservations),
            "slots_quarantined": self._rest.quarantined,
            "slots_resting": self._rest.resting,
            "namespaces": self.rows(range(len(self._namespaces))),
            "counters": {**msgspec.to_builtins(self.counters), "pages_evicted": self._room.evicted},
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
                "capacity": self._space.capacity(ns.number),
            }
            for ns in (self._namespaces[number] for number in numbers)
        ]

    def know_tenants(self, tenants: Mapping[int, str], found: Iterable[int] = ()) -> None:
        """The memory of these segments has held pages of these tenants, who may still map it.

        That of the segments ``found`` was there before: where no tenant is known, anybody may have mapped it.
        """
        for number, tenant in {**dict.fromkeys(found, ""), **tenants}.items():
            if 0 <= number < len(self._space.segments):
                self._space.segments[number].tenant = tenant

    def lose(self, segment: int) -> None:
        """The memory of ``segment``, none of whose slots is out, could not be replaced: nobody has it for now."""
        owner = self._space.segments[segment].owner
        self._space.lose(segment)
        if owner is not None:
            self._namespaces[owner].index.policy.resize(self._space.capacity(owner))

    def segment_tenant(self, segment: int) -> str | None:
        """The tenant whose pages ``segment`` holds; None when there is no such segment or nobody has it."""
        if not 0 <= segment < len(self._space.segments):
            return None
        owner = self._space.segments[segment].owner
        return None if owner is None else self._namespaces[owner].tenant

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = self._space.check() + self._announcements.check()
        broken += self._leases.check(self._namespaces) + self._reservations.check(self._namespaces)
        used = self._rest.resting + self._rest.quarantined
        for namespace in self._namespaces:
            used += len(namespace.index)
            broken += _check_pages(namespace)
        if used != sum(segment.used for segment in self._space.segments):
            broken.append(f"{used} pages are known but other slots are out")
        return broken


def _check_pages(namespace: NamespacePages) -> list[str]:
    broken = namespace.index.check()
    present = sum(page.present for page in namespace.index)
    if present + namespace.writing != len(namespace.index):
        broken.append(f"namespace {namespace.name} does not account for all of its pages")
    broken += [f"page {page.key.hex()} lies nowhere" for page in namespace.index if len(page.ref) != REF_BYTES]
    return broken
