"""Has the workers of a node take their turns in its event loop: parties take turns, and so do the workers of each.

What always holds: what comes while nobody else waits is done at once, up to a bound; between two rounds the loop sees
who else wants something; between two turns of one party every other party that has something to do gets one, however
many workers either has; a worker is listed once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore

AT_ONCE = 4096
"""Work (in keys) that is done when it comes, without a look at who else wants something, before turns are taken."""
ROUND = 1024
"""Work that is done in one round of the loop."""


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


class Rounds:
    """Whose turn it is on a node whose brain is ``core``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: PoolCore) -> None:
        self._loop = loop
        self._core = core
        self.turns = Turns()
        self._at_once = AT_ONCE
        """Work that may be done in the moment in which it comes, until all have had their turns."""
        self._taking_turns = False
        self._closed = False

    def has_work(self, connection: Worker) -> None:
        """Have what came on ``connection`` done, at once where nobody else waits."""
        if self._taking_turns or self._at_once <= 0:
            self.add(connection)
            return
        self._at_once -= connection.turn()
        if connection.busy:
            self.add(connection)
        elif self._core.unsettled:
            self._take_turns_soon()

    def add(self, worker: Worker) -> None:
        self.turns.add(worker)
        self._take_turns_soon()

    def close(self) -> None:
        self._closed = True

    def _take_turns_soon(self) -> None:
        if not self._taking_turns:
            self._taking_turns = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """Go round, and let the loop see between rounds who else wants something."""
        self._taking_turns = False
        if self._closed:
            return
        left = ROUND
        while left > 0 and (worker := self.turns.next()) is not None:
            left -= worker.turn()
            if worker.busy:
                self.turns.add(worker)
        self._core.settle_some()
        if self.turns or self._core.unsettled:
            self._take_turns_soon()
        else:
            self._at_once = AT_ONCE
