"""How often one peer may fail to prove who it is before it is no longer listened to.

Keys cannot be guessed, so this is about work and log lines: an engine with a wrong key that asks again and again, or
whoever tries.  What always holds: memory is bounded; who failed too often is refused without a look at its proof, and
may try again after a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

FREE_FAILURES = 5
"""Failures in a row that cost nothing."""
SECONDS_EACH = 10.0
"""After these, one attempt in so many seconds."""
MAX_PEERS = 1024
"""Peers that are remembered, those that failed last."""


class FailureLimiter:
    """Failed attempts of each peer, as an allowance that grows back with time."""

    def __init__(self) -> None:
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allows(self, peer: Hashable, now: float) -> bool:
        return self._allowance(peer, now) >= 1

    def failed(self, peer: Hashable, now: float) -> None:
        self._left[peer] = (max(self._allowance(peer, now) - 1, 0.0), now)
        self._left.move_to_end(peer)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)

    def _allowance(self, peer: Hashable, now: float) -> float:
        left, at = self._left.get(peer, (float(FREE_FAILURES), now))
        return min(left + (now - at) / SECONDS_EACH, float(FREE_FAILURES))
