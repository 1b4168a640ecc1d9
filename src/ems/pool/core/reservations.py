"""Slots promised to writers, until their pages are committed or the writer is gone.

What always holds: a page that is being written waits in one reservation; a commit takes all pages that it names, or
none; a reservation ends with its last page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from ems.errors import StaleReference
from ems.pool.core.namespaces import NamespacePages
from ems.pool.pages import Page


class UncommittedLimits(msgspec.Struct, frozen=True):
    """What one process may hold at a time, in shares of the pool (or of its tenant's quota) and in pages.

    Slots that nobody has committed yet are of no use to anybody: without a bound one client evicts a whole pool and
    stores nothing.
    A process may always hold what a step of an engine takes, as far as that is at most half of the pool: 8,192 tokens
    in blocks of 16 with eight pages each.  All processes of a tenant together may hold twice as much as one.
    """

    share: float = 0.25
    step_pages: int = 4096
    step_share: float = 0.5
    least_pages: int = 64
    together: float = 2.0
    together_share: float = 0.75
    seconds: float = 900.0
    """How long a reservation holds: longer than a save waits for the forward pass that fills its blocks."""

    def of_process(self, pool: int, page: int) -> float:
        """Bytes that one process may hold of ``pool`` bytes, in pages of ``page`` bytes."""
        step = min(self.step_pages * page, self.step_share * pool)
        return max(self.share * pool, step, self.least_pages * page)

    def of_tenant(self, pool: int, page: int) -> float:
        """Bytes that all processes of a tenant may hold together."""
        one = self.of_process(pool, page)
        return max(min(self.together * one, self.together_share * pool), one)


LIMITS = UncommittedLimits()


@dataclass(slots=True, eq=False)
class Reservation:
    """Pages of one namespace that ``client_id`` is writing, by their positions in what it asked for.

    ``process`` is whom they count for, if anybody, and the promise holds until ``until``.
    """

    client_id: int
    namespace: NamespacePages
    waiting: dict[int, Page]
    process: Hashable
    until: float


class Reservations:
    """All reservations of a node, by their numbers."""

    def __init__(self) -> None:
        self.all: dict[int, Reservation] = {}
        self._of_owner: dict[int, dict[int, None]] = {}
        self.by_process: Counter[Hashable] = Counter()
        """Bytes that each process is to write."""
        self.by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.all)

    def promise(self, number: int, held: Reservation) -> None:
        self.all[number] = held
        self._of_owner.setdefault(held.client_id, {})[number] = None
        self._count(held, len(held.waiting))

    def add(self, client_id: int, number: int, pages: dict[int, Page]) -> None:
        """More pages are to be written, by position.

        Raises StaleReference: the reservation is not ``client_id``'s or is gone.
        """
        held = self.get(client_id, number)
        held.waiting.update(pages)
        self._count(held, len(pages))

    def _count(self, held: Reservation, pages: int) -> None:
        if held.process is None:
            return
        size, tenant = pages * held.namespace.page_size, held.namespace.tenant
        self.by_process[held.process] += size
        self.by_tenant[tenant] += size
        if not self.by_process[held.process]:
            del self.by_process[held.process]
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]

    def expired(self, now: float, seconds: float) -> list[int]:
        """The numbers of reservations that held until ``now``; none holds longer than ``seconds`` from now."""
        over = []
        for number, held in self.all.items():  # the oldest first
            if now + seconds < held.until < inf:  # the clock was set back
                held.until = now + seconds
            if held.until <= now:
                over.append(number)
            elif held.until < inf:
                break
        return over

    def take(self, client_id: int, number: int, positions: Sequence[int] | None) -> tuple[NamespacePages, list[Page]]:
        """The pages at ``positions`` (all, when None) are written: their namespace, the pages in order.

        Raises StaleReference: the reservation is not ``client_id``'s or is gone, or has not all of these pages; nothing
        is taken then.
        """
        held = self.get(client_id, number)
        wanted = self.written(client_id, number, positions)
        written = list(map(held.waiting.pop, wanted))
        self._count(held, -len(written))
        if not held.waiting:
            self._forget(client_id, number)
        return held.namespace, written

    def written(self, client_id: int, number: int, positions: Sequence[int] | None) -> list[int]:
        """The ``positions`` (all, when None) in their order.  Raises StaleReference: as :meth:`take` does."""
        held = self.get(client_id, number)
        wanted = set(held.waiting if positions is None else positions)
        unknown = wanted - held.waiting.keys()
        if unknown:
            raise StaleReference(f"reservation {number} has no page {min(unknown)} to commit")
        return sorted(wanted)

    def take_back(self, client_id: int, number: int, most: int | None = None) -> list[Page]:
        """The last ``most`` pages (all, when None) that were not committed; the reservation ends with the last of them.

        Raises StaleReference: it is not ``client_id``'s or is gone.
        """
        held = self.get(client_id, number)
        count = len(held.waiting) if most is None else min(most, len(held.waiting))
        pages = [held.waiting.popitem()[1] for _ in range(count)]
        self._count(held, -len(pages))
        if not held.waiting:
            self._forget(client_id, number)
        return pages

    def _forget(self, client_id: int, number: int) -> None:
        del self.all[number], self._of_owner[client_id][number]
        if not self._of_owner[client_id]:
            del self._of_owner[client_id]

    def get(self, client_id: int, number: int) -> Reservation:
        """What ``client_id`` is writing.  Raises StaleReference: the reservation is not ``client_id``'s or is gone."""
        held = self.all.get(number)
        if held is None or held.client_id != client_id:
            raise StaleReference(f"reservation {number} is gone, reserve again")
        return held

    def of(self, client_id: int) -> list[int]:
        return list(self._of_owner.get(client_id, ()))

    def drop_segment(self, namespace: NamespacePages, begin: bytes) -> list[Page]:
        """The pages of ``namespace`` that are being written where ``begin`` says; none of them can be committed now."""
        gone: list[Page] = []
        for held in self.all.values():
            if held.namespace is namespace:
                lost = [at for at, page in held.waiting.items() if page.ref.startswith(begin)]
                gone += [held.waiting.pop(at) for at in lost]
                self._count(held, -len(lost))
        return gone

    def waiting(self, namespace: NamespacePages) -> Iterator[Page]:
        for held in self.all.values():
            if held.namespace is namespace:
                yield from held.waiting.values()
