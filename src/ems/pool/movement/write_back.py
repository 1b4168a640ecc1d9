"""What is written to a tier: a queue with an end, cut into batches of one namespace, and what is offered once more.

A brain.  What is queued is pinned in memory by a lease until it is written or let go.  When the queue is full, what
comes is not taken.  It is not held up instead, because saves and evictions must never wait for a disk: a page that was
not taken is still in memory, and is offered again before it would leave.  What always holds: no page is queued twice;
the bytes that wait or are being written are never more than the queue's limit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import msgspec

from ems.pool.pages import Page

LINGER = 0.1
"""Seconds that a page waits for others to be written with it."""


class Unit(msgspec.Struct, frozen=True, eq=False):
    """Pages of one namespace under one lease."""

    namespace: int
    lease: int
    keys: tuple[bytes, ...]
    size: int
    at: float


class WriteBackQueue:
    """The queue of one tier: at most ``limit`` bytes, written ``batch`` bytes at a time."""

    def __init__(self, limit: int, batch: int) -> None:
        self._limit = limit
        self._batch = batch
        self._waiting: OrderedDict[int, list[Unit]] = OrderedDict()
        """By namespace; that whose turn is next first."""
        self._known: set[tuple[int, bytes]] = set()
        self.size = 0
        """Bytes that wait or are being written."""
        self.dropped = 0
        """Pages that were not taken because the queue was full."""

    def __len__(self) -> int:
        """How many pages wait or are being written."""
        return len(self._known)

    @property
    def free(self) -> int:
        """Bytes that it still takes."""
        return max(self._limit - self.size, 0)

    def room(self, page_size: int) -> int:
        return self.free // page_size

    def portions(self, namespace: int, keys: Sequence[bytes], page_size: int) -> list[list[bytes]]:
        """Those of ``keys`` that are new, as far as there is room, in portions of at most a batch."""
        new = [key for key in dict.fromkeys(keys) if (namespace, key) not in self._known]
        room = self.room(page_size)
        self.dropped += max(len(new) - room, 0)
        new = new[:room]
        step = max(self._batch // page_size, 1)
        return [new[start : start + step] for start in range(0, len(new), step)]

    def add(self, unit: Unit) -> None:
        """Queue one portion, whose pages are pinned."""
        self._waiting.setdefault(unit.namespace, []).append(unit)
        self._known.update((unit.namespace, key) for key in unit.keys)
        self.size += unit.size

    def take(self, now: float, *, hurry: bool = False) -> list[Unit]:
        """The next batch, empty when nothing is ready; with ``hurry`` whatever waits is."""
        for namespace, units in self._waiting.items():
            waited = not 0 <= now - units[0].at < LINGER
            if hurry or waited or sum(unit.size for unit in units) >= self._batch:
                return self._taken(namespace, units)
        return []

    def _taken(self, namespace: int, units: list[Unit]) -> list[Unit]:
        count, size = 1, units[0].size
        while count < len(units) and size + units[count].size <= self._batch:
            size += units[count].size
            count += 1
        del self._waiting[namespace]
        if units[count:]:
            # Behind the other namespaces, which wait for their turn.
            self._waiting[namespace] = units[count:]
        return units[:count]

    def ended(self, units: Sequence[Unit]) -> None:
        """A batch was written, or could not be."""
        for unit in units:
            self._known.difference_update((unit.namespace, key) for key in unit.keys)
            self.size -= unit.size

    def give_back(self, namespace: int) -> list[Unit]:
        """Take back what waits of ``namespace``, which is not to be written after all; it counts until it ``ended``."""
        return self._waiting.pop(namespace, [])

    def give_back_all(self) -> list[Unit]:
        return [unit for namespace in list(self._waiting) for unit in self.give_back(namespace)]


class _Walk:
    """One walk through an order: ``ahead`` is what it has not come to; see :class:`PreEvictionWalk` for ``settled``."""

    def __init__(self, order: Iterable[Page], before: dict[bytes, float | None]) -> None:
        self.left = deque(order)
        self.before = before
        """What the walk before it came to."""
        self.settled: dict[bytes, float | None] = {}
        """By where each page lies that it came to: its last use when the tier had it or would not take it."""


class PreEvictionWalk:
    """Which pages a tier is offered before they leave memory: all that would leave soon, a few at a time, in turn.

    Looking only at whoever is first would not do: those stay first while the tier has them already, and one pass of
    eviction takes thousands that stood behind.  What always holds: while an order stands, every page of it comes before
    any comes twice; what the tier was given, or would not take, comes again only when it was used since or stood
    elsewhere meanwhile, so that a tier that is smaller than what would leave is not written for ever; what is kept is
    no more than two walks came to; each call costs what it may look at, one in so many the length of the order, too.
    """

    def __init__(self) -> None:
        self._walks: dict[int, _Walk] = {}

    def next(self, namespace: int, order: Iterable[Page], most: int) -> list[Page]:
        """Look at the next ``most`` pages and return those to be offered, some of which may have left meanwhile.

        ``order`` are the pages that would leave soon, the first first; it is read only when a walk begins anew.
        """
        walk = self._walks.get(namespace)
        if walk is None or not walk.left:
            walk = self._walks[namespace] = _Walk(order, walk.settled if walk is not None else {})
        looked = [walk.left.popleft() for _ in range(min(most, len(walk.left)))]
        walk.settled.update((page.ref, walk.before.get(page.ref)) for page in looked if page.present)
        return [page for page in looked if page.present and walk.settled[page.ref] != page.used]

    def settled(self, namespace: int, pages: Iterable[tuple[bytes, float]]) -> None:
        """The tier was given pages, or would not take them: where each lies, and when it was used last before that."""
        walk = self._walks.get(namespace)
        if walk is not None:
            for ref, used in pages:
                for known in (walk.settled, walk.before):
                    if ref in known:
                        known[ref] = used
