"""What waits to be written to a tier: a queue with an end, cut into batches of one namespace.

A brain.  What is queued is pinned in memory by a lease until it is written or let go.  When the queue is full, what
comes is not taken.  It is not held up instead, because saves and evictions must never wait for a disk: a page that was
not taken is still in memory, and is offered again before it would leave.  What always holds: no page is queued twice;
the bytes that wait or are being written are never more than the queue's limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

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
        self._size = 0
        self._waiting_bytes: dict[int, int] = {}
        self.dropped = 0
        """Pages that were not taken because the queue was full."""

    @property
    def size(self) -> int:
        """Bytes that wait or are being written."""
        return self._size

    def room(self, page_size: int) -> int:
        return max((self._limit - self._size) // page_size, 0)

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
        self._waiting_bytes[unit.namespace] = self._waiting_bytes.get(unit.namespace, 0) + unit.size
        self._known.update((unit.namespace, key) for key in unit.keys)
        self._size += unit.size

    def take(self, now: float, *, hurry: bool = False) -> list[Unit]:
        """The next batch, empty when nothing is ready; with ``hurry`` whatever waits is."""
        for namespace, units in self._waiting.items():
            ready = self._waiting_bytes[namespace] >= self._batch or not 0 <= now - units[0].at < LINGER
            if ready or hurry:
                return self._taken(namespace, units)
        return []

    def _taken(self, namespace: int, units: list[Unit]) -> list[Unit]:
        taken: list[Unit] = []
        size = 0
        for unit in units:
            if taken and size + unit.size > self._batch:
                break
            taken.append(unit)
            size += unit.size
        left = units[len(taken) :]
        del self._waiting[namespace]
        self._waiting_bytes[namespace] -= size
        if left:
            # Behind the other namespaces, which wait for their turn.
            self._waiting[namespace] = left
        else:
            del self._waiting_bytes[namespace]
        return taken

    def ended(self, units: Sequence[Unit]) -> None:
        """A batch was written, or could not be."""
        for unit in units:
            self._known.difference_update((unit.namespace, key) for key in unit.keys)
            self._size -= unit.size

    def let_go(self) -> list[Unit]:
        """Take back all that waits: the tier was cut out."""
        units = [unit for waiting in self._waiting.values() for unit in waiting]
        self._waiting.clear()
        self._waiting_bytes.clear()
        self.ended(units)
        return units

    def give_back(self, namespace: int) -> list[Unit]:
        """Take back what waits of ``namespace``, which is not to be written after all; it counts until it ``ended``."""
        self._waiting_bytes.pop(namespace, None)
        return self._waiting.pop(namespace, [])
