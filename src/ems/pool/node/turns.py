"""Whose turn it is: parties take turns, and so do the workers of each.

A brain.  What always holds: between two turns of one party every other party that has something to do gets one, however
many workers either has; a worker is listed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class Worker(Protocol):
    """Who has something to do, for a party: a tenant, or on an open node a user."""

    party: str

    @property
    def busy(self) -> bool: ...

    def turn(self) -> int:
        """Do a bounded part of it; how much work that was, in keys."""


class Turns:
    """The workers that wait for their turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Worker, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Worker]:
        for workers in self._waiting.values():
            yield from workers

    def add(self, worker: Worker) -> None:
        self._waiting.setdefault(worker.party, OrderedDict())[worker] = None

    def drop(self, worker: Worker) -> None:
        mine = self._waiting.get(worker.party)
        if mine is not None:
            mine.pop(worker, None)
            if not mine:
                del self._waiting[worker.party]

    def next(self) -> Worker | None:
        if not self._waiting:
            return None
        party, workers = next(iter(self._waiting.items()))
        worker, _ = workers.popitem(last=False)
        if workers:
            self._waiting.move_to_end(party)
        else:
            del self._waiting[party]
        return worker


class Farewell:
    """What is left to do for a client that is gone, a step each turn."""

    def __init__(self, party: str, steps: Iterator[int]) -> None:
        self.party = party
        self._steps = steps
        self.busy = True

    def turn(self) -> int:
        work = next(self._steps, None)
        self.busy = work is not None
        return work or 0
