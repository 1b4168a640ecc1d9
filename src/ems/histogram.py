"""A histogram that is cheap to add to; a collector turns it into a metric at the moment of a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts by bucket; a value belongs to the first bucket whose upper bound is not below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: Histogram) -> Histogram:
        """Return both together; they have the same bounds."""
        both = Histogram(self.bounds)
        both.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both

    def cumulative(self) -> list[tuple[str, int]]:
        """Pairs of an upper bound and the count up to it, the last bound being ``+Inf``."""
        pairs, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs
