"""Has the workers of a node take their turns in its event loop.

What always holds: what comes while nobody else waits is done at once, up to a bound; between two rounds the loop sees
who else wants something.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ems.pool.node.turns import Turns, Worker

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore

AT_ONCE = 4096
"""Work (in keys) that is done when it comes, without a look at who else wants something, before turns are taken."""
ROUND = 1024
"""Work that is done in one round of the loop."""


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
        """``worker`` has something to do, and takes its turns."""
        self.turns.add(worker)
        self._take_turns_soon()

    def close(self) -> None:
        self._closed = True

    def _turn(self) -> int:
        worker = self.turns.next()
        if worker is None:
            return ROUND
        work = worker.turn()
        if worker.busy:
            self.turns.add(worker)
        return work

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
        while left > 0 and self.turns:
            left -= self._turn()
        self._core.settle_some()
        if self.turns or self._core.unsettled:
            self._take_turns_soon()
        else:
            self._at_once = AT_ONCE
