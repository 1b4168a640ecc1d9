"""The brain of a pool node: every decision about pages, and nothing else.

It knows no socket, no memory and no clock.  Each verb takes who asks and what time it is, and answers with
what is to be done: headers to write, segments to describe.  What always holds, and :meth:`PoolCore.check`
verifies: a key has at most one page; a page becomes readable only by its writer's commit; a leased page
stays where it is; whoever disappears holds nothing any more; every slot is in exactly one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import msgspec
import numpy as np

from ems.errors import NoSpace, PoolRefused, StaleReference
from ems.pool.changes import ChangeLog
from ems.pool.index import Index, Page
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES, PageRef, carve
from ems.pool.room import Assigned, NamespacePages, Outcome, Room
from ems.pool.space import Space

LIMBO_SECONDS = 30.0
"""How long a slot stays unused whose writer was cut off but lives: it may still be copying into it."""

MAX_NAMESPACES = 4096
"""Most namespaces of one node; more than any host's models and layouts, few enough to be walked."""

MAX_NAME = 512
"""Characters of the longest name of a namespace."""


_KEY = np.dtype(f"V{KEY_BYTES}")


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
        return packed_refs(self.pages)


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
    already_present: int = 0
    already_writing: int = 0
    leases_lost: int = 0
    reservations_lost: int = 0


class _Reservation:
    __slots__ = ("namespace", "owner", "waiting")

    def __init__(self, owner: int, namespace: NamespacePages) -> None:
        self.owner = owner
        self.namespace = namespace
        self.waiting: dict[int, Page] = {}


class _Lease:
    __slots__ = ("namespace", "owner", "pages")

    def __init__(self, owner: int, namespace: NamespacePages, pages: list[Page]) -> None:
        self.owner = owner
        self.namespace = namespace
        self.pages = pages


def packed_refs(pages: list[Page]) -> bytes:
    """Where ``pages`` lie, in the form that travels."""
    return b"".join([page.ref for page in pages])


def split_keys(raw: bytes) -> list[bytes]:
    """Keys that travelled as one byte string."""
    keys: list[bytes] = np.frombuffer(raw, dtype=_KEY).tolist()
    return keys


class PoolCore:
    """All state of a node.  ``owner`` is a number that stands for one connection of a client."""

    def __init__(self, segment_sizes: list[int], *, high_watermark: float = 0.95, eviction_ratio: float = 0.05) -> None:
        self._space = Space(segment_sizes)
        self.changes = ChangeLog()
        self._room = Room(self._space, self, self.changes, high_watermark=high_watermark, eviction_ratio=eviction_ratio)
        self._now = 0.0
        self._namespaces: list[NamespacePages] = []
        self._by_name: dict[str, NamespacePages] = {}
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
            PoolRefused: the namespace exists with another page size, or the name is unfit, or there are too many.
        """
        known = self._by_name.get(name)
        if known is not None:
            if known.page_size != page_size:
                raise PoolRefused(
                    f"namespace {name} has pages of {known.page_size} bytes, but {page_size} were asked for; "
                    "the layout fingerprint must change whenever the page size does"
                )
            return known.number
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise PoolRefused(
                f"a namespace is called {name[:40]!r} ({len(name)} characters), expected 1 to {MAX_NAME} printable ones"
            )
        if len(self._namespaces) >= MAX_NAMESPACES:
            raise PoolRefused(f"this node has {MAX_NAMESPACES} namespaces and takes no more, restart it to begin anew")
        largest = max((segment.size for segment in self._space.segments), default=0)
        if page_size <= 0 or carve(largest, page_size).slot_count == 0:
            raise NoSpace(
                f"a page of {page_size} bytes does not fit in a segment of {largest} bytes, "
                "start the node with a larger --size or --segment-size, or use a smaller block size"
            )
        namespace = NamespacePages(len(self._namespaces), name, page_size, self._now)
        self._namespaces.append(namespace)
        self._room.add(namespace)
        self._by_name[name] = namespace
        return namespace.number

    def find_namespace(self, name: str) -> int:
        """The number of the namespace ``name``, -1 when nobody has stored anything in one of that name."""
        known = self._by_name.get(name)
        return -1 if known is None else known.number

    def touched(self, segment: int, touched: int) -> None:
        """The first ``touched`` bytes of ``segment`` were touched and may be handed out."""
        self._space.touch(segment, touched)

    def touching_ended(self) -> None:
        """No more memory will be touched; the pool is as large as what was touched by now."""
        self._space.touching_ended()

    def _namespace(self, number: int) -> NamespacePages:
        if not 0 <= number < len(self._namespaces):
            raise StaleReference(f"namespace {number} is not open, open it again")
        return self._namespaces[number]

    # Writing

    def reserve(
        self, owner: int, namespace: int, parent: bytes, keys: list[bytes], tail: Tail | None = None
    ) -> Reserved:
        """Promise slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        With ``tail`` the last of them is not full and can be found by its tokens.

        Raises:
            PoolRefused: the tail has more tokens than a page can hold.
        """
        space = self._namespace(namespace)
        if tail is not None and len(tail.tokens) > space.page_size:
            # A token's state is larger than its id: this would cost the node more than the page costs the pool.
            raise PoolRefused(
                f"a tail of {len(tail.tokens)} bytes of tokens, expected at most the {space.page_size} bytes of a page"
            )
        space.last_used = self._now
        self.settle()
        reservation = _Reservation(owner, space)
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
                    reservation.waiting[position] = page
                    granted.append(page)
                    if tail is not None and position == len(keys) - 1:
                        space.index.list_tail(page, tail)
            before = key
        self._count_refusals(outcomes)
        number = 0
        if granted:
            number = self._new_id()
            self._reservations[number] = reservation
        if self._room.must_trim(space):
            with self._spared(space, parent, keys):
                self._room.trim(space)
        return Reserved(number, bytes(outcomes), granted, assigned)

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

    def commit(self, owner: int, reservation: int, positions: list[int] | None = None) -> list[Page]:
        """The pages at ``positions`` (all, when None) of ``reservation`` are written whole: publish them.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone, or has not all of these pages to
                commit; nothing is published then.
        """
        held = self._reservation(owner, reservation)
        wanted = sorted(held.waiting if positions is None else set(positions))
        unknown = [position for position in wanted if position not in held.waiting]
        if unknown:
            raise StaleReference(f"reservation {reservation} has no page {unknown[0]} to commit")
        published = [held.waiting.pop(position) for position in wanted]
        held.namespace.index.publish(published)
        held.namespace.writing -= len(published)
        if self.changes.recording():
            self.changes.stored(held.namespace.name, [page.key for page in published])
        if not held.waiting:
            del self._reservations[reservation]
        self.counters.pages_committed += len(published)
        return published

    def abort(self, owner: int, reservation: int) -> None:
        """Give back what of ``reservation`` was not committed.

        Raises:
            StaleReference: the reservation is not ``owner``'s or is gone.
        """
        held = self._reservation(owner, reservation)
        del self._reservations[reservation]
        for page in held.waiting.values():
            self._space.give_back(PageRef.unpack(self._drop_unwritten(held.namespace, page)))

    def _reservation(self, owner: int, number: int) -> _Reservation:
        held = self._reservations.get(number)
        if held is None or held.owner != owner:
            raise StaleReference(f"reservation {number} is gone, reserve again")
        return held

    def _drop_unwritten(self, namespace: NamespacePages, page: Page) -> bytes:
        ref = page.ref
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1
        return ref

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
        number = self._lease(owner, space, pages) if lease and pages else 0
        return Found(pages, pending, number)

    def lookup_tail(self, owner: int, namespace: int, tail: Tail, *, lease: bool) -> tuple[int, Found]:
        """How many leading tokens of ``tail`` a page of its directory holds, and that page, as :meth:`lookup` does."""
        space = self._namespace(namespace)
        page, shared, pending = space.index.find_tail(tail)
        if page is None:
            return 0, Found([], int(pending), 0)
        self.counters.tails_hit += 1
        number = self._lease(owner, space, [page]) if lease else 0
        return shared, Found([page], int(pending), number)

    def _lease(self, owner: int, namespace: NamespacePages, pages: list[Page]) -> int:
        number = self._new_id()
        for page in pages:
            page.leases += 1
        namespace.last_used = self._now
        self._leases[number] = _Lease(owner, namespace, pages)
        self._used.append((namespace.index, pages))
        return number

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
        self._now = now
        for number in [n for n, lease in self._leases.items() if lease.owner == owner]:
            self.release(owner, number)
            self.counters.leases_lost += 1
        resting: list[bytes] = []
        for number in [n for n, held in self._reservations.items() if held.owner == owner]:
            self.counters.reservations_lost += 1
            held = self._reservations.pop(number)
            resting += [self._drop_unwritten(held.namespace, page) for page in held.waiting.values()]
        if resting:
            self._limbo[owner] = (now + LIMBO_SECONDS, resting)
            if not alive:
                self.died(owner)

    def rests(self, owner: int) -> bool:
        """Whether slots of ``owner`` rest because its process was alive when it left."""
        return owner in self._limbo

    def died(self, owner: int) -> None:
        """The process of ``owner`` ended: nobody writes into its slots any more."""
        _, refs = self._limbo.pop(owner, (0.0, []))
        for ref in refs:
            self._space.give_back(PageRef.unpack(ref))

    def tick(self, now: float) -> None:
        """Time went by: settle, free slots whose rest is over, continue an eviction that was cut short."""
        self._now = now
        self.settle()
        self.changes.tick(now)
        for owner in [owner for owner, (until, _) in self._limbo.items() if until <= now]:
            self.died(owner)
        for namespace in self._namespaces:
            namespace.denied = False
            if self._room.must_trim(namespace):
                self._room.trim(namespace)

    def _new_id(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number

    # What may not leave, asked by the room

    def held(self, namespace: NamespacePages) -> Iterator[Page]:
        """Pages of ``namespace`` that are leased or being written."""
        for lease in self._leases.values():
            if lease.namespace is namespace:
                yield from lease.pages
        for reservation in self._reservations.values():
            if reservation.namespace is namespace:
                yield from reservation.waiting.values()

    def resting(self) -> Collection[int]:
        """Segments with slots that wait for a cut-off writer to end."""
        return {PageRef.unpack(ref).segment for _, refs in self._limbo.values() for ref in refs}

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
            "counters": {**msgspec.to_builtins(self.counters), "pages_evicted": self._room.evicted},
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


def _check_pages(namespace: NamespacePages, leases: dict[int, int]) -> list[str]:
    broken = namespace.index.check()
    present = sum(page.present for page in namespace.index)
    if present + namespace.writing != len(namespace.index):
        broken.append(f"namespace {namespace.name} does not account for all of its pages")
    for page in namespace.index:
        if len(page.ref) != REF_BYTES:
            broken.append(f"page {page.key.hex()} lies nowhere")
        if page.leases != leases.get(id(page), 0):
            broken.append(f"page {page.key.hex()} counts {page.leases} leases, expected {leases.get(id(page), 0)}")
    return broken
