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

from ems.errors import PoolRefused
from ems.pool.core.answers import Begun, Committed, Reserved
from ems.pool.layout import PageRef
from ems.pool.pages import Assigned, Outcome, Page
from ems.pool.reasons.words import Reason

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.core.state import PoolState
    from ems.pool.core.uncommitted import UncommittedLimits
    from ems.pool.keys import Tail

MAX_NOTED = 256
"""Most keys of one refused reservation whose refusal is remembered."""

_REFUSALS = {
    Outcome.NO_SPACE: Reason.REFUSED_NO_SPACE,
    Outcome.NOT_TOUCHED: Reason.REFUSED_NOT_TOUCHED,
    Outcome.OVER_SHARE: Reason.REFUSED_SHARE,
}
"""Outcomes that are remembered; the counters have the names of these reasons."""


class Writing:
    """The writers of one node, each of which may hold as much uncommitted as ``limits`` say."""

    def __init__(self, state: PoolState, limits: UncommittedLimits) -> None:
        self._state = state
        self._limits = limits

    def refuse_unfit_tail(self, namespace: int, key: bytes, tail: Tail) -> None:
        """Refuse a tail that would cost the node more than the page costs the pool, or that is not the page's.

        Raises:
            PoolRefused: it has more tokens than a page can hold, or its page has another ``key``.
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
        on what was ``begun``, if anything was.

        Raises:
            StaleReference: what was begun is gone.
        """
        ns = self._state.namespaces.opened(namespace)
        begun = begun or Begun()
        if self._state.draining:
            return self._refuse_all(ns, keys, begun.reservation)
        ns.last_used = self._state.now
        self._state.settle_some()
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
                    tail = tails[position] if tails else None
                    if tail is not None:
                        ns.index.list_tail(page, tail)
            before = key
        for stack in spared:
            stack.close()
        self._count_refusals(ns, keys, outcomes)
        number = self._wait_for(client_id, ns, begun.reservation, waiting)
        if self._state.reclaimer.must_trim(ns):
            with self._spared(ns, parent, keys):
                self._state.reclaimer.trim(ns)
        return Reserved(number, bytes(outcomes), granted, assigned, ns.page_size)

    def _wait_for(self, client_id: int, namespace: NamespacePages, number: int, pages: dict[int, Page]) -> int:
        """Reserve ``pages``, by position, as part of reservation ``number`` if there is one; its number."""
        if number:
            self._state.reservations.add(client_id, number, pages)
        elif pages:
            number = self._state.new_id()
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
        self._state.counters.refused_draining += len(refused)
        for key in refused[:MAX_NOTED]:
            self._state.reasons.eviction_log.note(namespace.number, key, Reason.REFUSED_DRAINING.code)
        return Reserved(reservation, bytes(outcomes), [], [], namespace.page_size)

    def _promise(self, number: int, client_id: int, namespace: NamespacePages, waiting: dict[int, Page]) -> None:
        if client_id > 0:
            process, until = self._state.writer(client_id).process, self._state.now + self._limits.seconds
            self._state.reservations.promise(number, client_id, namespace, waiting, process=process, until=until)
        else:  # tiers bound what they fetch, and end it themselves
            self._state.reservations.promise(number, client_id, namespace, waiting)

    def _may_reserve(self, client_id: int, namespace: NamespacePages) -> float:
        """How many more pages of ``namespace`` a client may hold without having committed them."""
        if client_id <= 0:
            return inf
        state = self._state
        tenant, page, process = namespace.tenant, namespace.page_size, state.writer(client_id).process
        bounds = state.shares.bounds(tenant)
        pool = state.slots.total if bounds is None else min(bounds.cap, state.slots.total)
        mine = state.reservations.bytes_of(process) + state.deferred.bytes_of(process)
        together = state.reservations.bytes_of_tenant(tenant)
        if state.deferred.resting:
            together += sum(
                size for number, size in state.deferred.bytes_in.items() if state.segment_tenant(number) == tenant
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
        ref = self._state.slots.take(namespace.number)
        if ref is not None:
            return ref
        if not spared:  # once for all keys, however often pages have to leave for them
            spared.append(contextlib.ExitStack())
            spared[0].enter_context(self._spared(namespace, parent, keys))
        return self._state.reclaimer.take(namespace, self._state.now, assigned)

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
        ns, wanted, published = self._state.reservations.take(client_id, reservation, positions)
        ns.index.publish(published)
        for page in published:
            page.used = self._state.now
        ns.writing -= len(published)
        if self._state.changes.recording():
            self._state.changes.stored(ns.name, [page.key for page in published])
        self._state.counters.pages_committed += len(published)
        return Committed(published, wanted, ns.name, ns.page_size)

    def refresh(self, pages: Sequence[Page], namespace: str) -> None:
        """What hangs on ``pages`` was stored after them: they are used as recently."""
        known = self._state.namespaces.named(namespace)
        here = [page for page in pages if page.present]
        if known is not None and here:
            known.index.policy.refresh(here)

    def abort(self, client_id: int, reservation: int, most: int | None = None) -> bool:
        """Give back what of ``reservation`` was not committed, ``most`` pages of it; whether some are left.

        Raises:
            StaleReference: the reservation is not ``client_id``'s or is gone.
        """
        namespace = self._state.reservations.get(client_id, reservation).namespace
        for page in self._state.reservations.take_back(client_id, reservation, most):
            self._state.slots.give_back(PageRef.unpack(self._state.drop_unwritten(namespace, page)))
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
        for outcome, reason in _REFUSALS.items():
            refused = outcomes.count(outcome)
            if not refused:
                continue
            name = reason.value
            setattr(self._state.counters, name, getattr(self._state.counters, name) + refused)
            for key in islice(compress(keys, (one == outcome for one in outcomes)), MAX_NOTED):
                self._state.reasons.eviction_log.note(namespace.number, key, reason.code)
