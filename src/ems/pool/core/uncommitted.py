"""How much of the pool writers may hold that they have not committed, and for how long.

Slots that are reserved, or that wait for a writer that was cut off, are of no use to anybody: without a bound one
client evicts a whole pool and stores nothing.
"""

from __future__ import annotations

import msgspec


class UncommittedLimits(msgspec.Struct, frozen=True):
    """What one process may hold at a time, in shares of the pool (or of its tenant's quota) and in pages.

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
