"""When a worker that ended is followed by another one.  A brain.

What always holds: the first end, and each of a worker that lasted, is followed at once; repetitions wait for twice as
long each time, :data:`LONGEST_DELAY` seconds at most.
"""

from __future__ import annotations

from typing import Final

LONGEST_DELAY: Final = 10.0
PROVEN: Final = 60.0
"""Seconds after which a worker's end is no repetition of the one before."""


class Restarts:
    """Of ``count`` workers, which are numbered from 0."""

    def __init__(self, count: int) -> None:
        self._ends = [0] * count
        """How often in a row each worker has ended."""

    def delay(self, number: int, lasted: float) -> float:
        """Return the seconds until a worker is to be followed that ended after ``lasted`` seconds."""
        ends = self._ends[number] = 1 if lasted > PROVEN else self._ends[number] + 1
        return 0.0 if ends == 1 else min(2.0 ** min(ends - 2, 10), LONGEST_DELAY)
