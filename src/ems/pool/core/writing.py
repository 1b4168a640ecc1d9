"""What writers do: they reserve slots, and commit or give back what they were promised.

What always holds: a key has at most one page; a page becomes readable by its writer's commit only; what a refused
reservation names is remembered with the reason, a bounded number of keys of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import compress, islice
from math import inf
from typing import TYPE_CHECKING

import msgspec

from ems.errors import PoolRefused
from ems.pool.core.reservations import Reservation
from ems.pool.pages import Assigned, Outcome, Page
from ems.pool.reasons.words import Reason

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.core.reservations import UncommittedLimits
    from ems.pool.keys import Tail

MAX_NOTED = 256
"""Most keys of one refused reservation whose refusal is remembered."""

_REFUSALS = {
    Outcome.NO_SPACE: Reason.REFUSED_NO_SPACE,
    Outcome.NOT_TOUCHED: Reason.REFUSED_NOT_TOUCHED,
    Outcome.OVER_SHARE: Reason.REFUSED_SHARE,
}
"""Outcomes that are remembered; the counters have the names of these reasons."""


class Begun(msgspec.Struct, frozen=True):
    """A reservation of which more is to come: its number, how many keys it has so far, why no more can be granted."""

    reservation: int = 0
    count: int = 0
    refusal: Outcome | None = None


class Reserved(msgspec.Struct, frozen=True):
    """Answer to a reservation: one outcome a key, and the granted pages in the order of their keys."""

    reservation: int
    outcomes: bytes
    granted: list[Page]
    assigned: list[Assigned]
    page_size: int


class Committed(msgspec.Struct, frozen=True):
    """Answer to a commit: the pages in the order of their blocks, and where they belong."""

    pages: list[Page]
    namespace: str
    page_size: int


class Writing:
    """The writers of one node, each of which may hold as much uncommitted as ``limits`` say."""

    def __init__(self, state: PoolCore, limits: UncommittedLimits) -> None:
        self._state = state
        self._limits = limits

    def refuse_unfit_tail(self, namespace: int, key: bytes, tail: Tail) -> None:
        """Refuse a tail that would cost the node more than the page costs the pool, or that is not the page's.

        Raises PoolRefused: it has more tokens than a page can hold, or its page has another ``key``.
        """
        size = self._state.namespaces.opened(namespace).page_size
        if len(tail.tokens) > size:
            raise PoolRefused(
                f"a tail of {len(tail.tokens)} bytes of tokens, expected at most the {size} bytes of a page"
            )
        if key != tail.key:
            raise PoolRefused(
                f"the key is {key.hex()}, expected {tail.key.hex()}, the hash of its tail's directory and tokens"
            )

    def reserve(
        self,
        client_id: int,
        namespace: int,
        parent: bytes,
        keys: list[bytes],
        tails: Sequence[Tail | None] = (),
        begun: Begun | None = None,
    ) -> Reserved:
        """Promise slots for the pages of ``keys``, consecutive blocks after the block of ``parent``.

        Those with a tail can be found by their tokens too; ``tails`` has one for each of them, or none at all.  They go
        on what was ``begun``, if anything was.  Raises StaleReference: what was begun is gone.
        """
        state, begun = self._state, begun or Begun()
        if begun.reservation:
            state.reservations.get(client_id, begun.reservation)  # before anything is promised that would go on it
        ns = state.namespaces.opened(namespace)
        ns.last_used = state.now
        state.settle_some()
        waiting: dict[int, Page] = {}
        outcomes = bytearray(len(keys))
        assigned: list[Assigned] = []
        known = [page for page in map(ns.index.get, keys) if page is not None]
        with self._spared([*filter(None, [ns.index.get(parent)]), *known]):
            absent = len(set(keys)) - len(set(known))
            refs, refusal = self._take(client_id, ns, absent, assigned, begun)
            left, before = iter(refs), parent
            for position, key in enumerate(keys):
                page = ns.index.get(key)  # again: a key that is named twice is known by now
                if page is not None:
                    outcomes[position] = Outcome.PRESENT if page.present else Outcome.WRITING
                elif (ref := next(left, None)) is not None:
                    page = waiting[begun.count + position] = ns.index.insert(key, ref, before)
                    tail = tails[position] if tails else None
                    if tail is not None:
                        ns.index.list_tail(page, tail)
                elif refusal is not None:
                    # What follows a block that found no room is of no use without it, and would look in vain again.
                    outcomes[position] = refusal
                before = key
            ns.writing += len(waiting)
            if state.reclaimer.must_trim(ns):
                state.reclaimer.trim(ns)
        self._count_refusals(ns, keys, outcomes)
        granted, number = list(waiting.values()), self._wait_for(client_id, ns, begun.reservation, waiting)
        return Reserved(number, bytes(outcomes), granted, assigned, ns.page_size)

    def _take(
        self, client_id: int, namespace: NamespacePages, count: int, assigned: list[Assigned], begun: Begun
    ) -> tuple[list[bytes], Outcome | None]:
        """Slots for ``count`` pages, or for some of them and why there are no more."""
        state = self._state
        refusal = Outcome.NO_SPACE if state.draining else begun.refusal
        if refusal is not None or not count:
            return [], refusal
        most = max(min(count, self._may_reserve(client_id, namespace)), 0)
        refs, refusal = state.reclaimer.take(namespace, int(most), state.now, assigned)
        return refs, refusal or (Outcome.OVER_SHARE if most < count else None)

    def _wait_for(self, client_id: int, namespace: NamespacePages, number: int, pages: dict[int, Page]) -> int:
        """Reserve ``pages``, by position, as part of reservation ``number`` if there is one; its number."""
        state = self._state
        if number:
            state.reservations.add(client_id, number, pages)
        elif pages:
            number = state.new_id()
            # Tiers bound what they fetch, and end it themselves.
            process = state.writer(client_id).process if client_id > 0 else None
            until = state.now + self._limits.seconds if client_id > 0 else inf
            state.reservations.promise(number, Reservation(client_id, namespace, pages, process, until))
        return number

    def _may_reserve(self, client_id: int, namespace: NamespacePages) -> float:
        """How many more pages of ``namespace`` a client may hold without having committed them."""
        if client_id <= 0:
            return inf
        state = self._state
        tenant, page, process = namespace.tenant, namespace.page_size, state.writer(client_id).process
        pool = min(state.shares.bounds(tenant).cap, state.slots.total)
        mine = state.reservations.by_process[process] + state.deferred.bytes_of(process)
        together = state.reservations.by_tenant[tenant]
        if state.deferred.resting:
            together += sum(
                size for number, size in state.deferred.bytes_in.items() if state.segment_tenant(number) == tenant
            )
        left = min(self._limits.of_process(pool, page) - mine, self._limits.of_tenant(pool, page) - together)
        return left // page

    @contextlib.contextmanager
    def _spared(self, pages: list[Page]) -> Iterator[None]:
        """Pages of a reservation, and its prefix, do not make room for each other."""
        for page in pages:
            page.leases += 1
        yield
        for page in pages:
            page.leases -= 1

    def commit(self, client_id: int, reservation: int, positions: list[int] | None = None) -> Committed:
        """The pages at ``positions`` (all, when None) of ``reservation`` are written whole: publish them.

        Raises StaleReference: the reservation is not ``client_id``'s or is gone, or has not all of these pages to
        commit; nothing is published then.
        """
        ns, published = self._state.reservations.take(client_id, reservation, positions)
        ns.index.publish(published)
        for page in published:
            page.used = self._state.now
        ns.writing -= len(published)
        if self._state.changes.recording():
            self._state.changes.stored(ns.name, [page.key for page in published])
        self._state.counters.pages_committed += len(published)
        return Committed(published, ns.name, ns.page_size)

    def refresh(self, pages: Sequence[Page], namespace: str) -> None:
        """What hangs on ``pages`` was stored after them: they are used as recently."""
        known = self._state.namespaces.named(namespace)
        here = [page for page in pages if page.present]
        if known is not None and here:
            known.index.policy.refresh(here)

    def abort(self, client_id: int, reservation: int, most: int | None = None) -> bool:
        """Give back what of ``reservation`` was not committed, ``most`` pages of it; whether some are left.

        Raises StaleReference: the reservation is not ``client_id``'s or is gone.
        """
        namespace = self._state.reservations.get(client_id, reservation).namespace
        for page in self._state.reservations.take_back(client_id, reservation, most):
            self._state.slots.give_back(self._state.drop_unwritten(namespace, page))
        return reservation in self._state.reservations.all

    def expire(self) -> None:
        """Take back what was reserved for too long; its writers may still be copying."""
        state = self._state
        for number in state.reservations.expired(state.now, self._limits.seconds):
            held = state.reservations.all[number]
            pages = state.reservations.take_back(held.client_id, number)
            refs = [state.drop_unwritten(held.namespace, page) for page in pages]
            state.deferred.defer(state.writer(held.client_id), refs, state.now)
            state.counters.reservations_expired += 1

    def _count_refusals(self, namespace: NamespacePages, keys: list[bytes], outcomes: bytearray) -> None:
        self._state.counters.already_present += outcomes.count(Outcome.PRESENT)
        self._state.counters.already_writing += outcomes.count(Outcome.WRITING)
        reasons = {Outcome.NO_SPACE: Reason.REFUSED_DRAINING} if self._state.draining else _REFUSALS
        for outcome, reason in reasons.items():
            refused = outcomes.count(outcome)
            if not refused:
                continue
            name = reason.value
            setattr(self._state.counters, name, getattr(self._state.counters, name) + refused)
            for key in islice(compress(keys, (one == outcome for one in outcomes)), MAX_NOTED):
                self._state.reasons.eviction_log.note(namespace.number, key, reason.code)
