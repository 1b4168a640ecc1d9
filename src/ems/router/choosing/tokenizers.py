"""Which instance is asked for the token ids of a prompt.  A brain.

What always holds: one that was late, or broke off, is not asked for :data:`REST` seconds and so delays few requests;
that says nothing of what it can do for requests, so no breaker is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ems.router.fleet import Instance

REST: Final = 1.0


class Tokenizers:
    """Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._asking: Counter[Instance] = Counter()
        self._rests: dict[Instance, float] = {}

    def begin(self, usable: Sequence[Instance], now: float) -> Instance | None:
        """Return who is asked now, if anybody: the one with the least to do; each time is ended by :meth:`end`."""
        asked = [one for one in usable if self._rests.get(one, now) <= now]
        if not asked:
            return None
        least = min(asked, key=lambda one: (one.breaker.doubted, self._asking[one], one.running, one.turn))
        self._asking[least] += 1
        return least

    def end(self, instance: Instance, now: float, *, rests: bool) -> None:
        self._asking -= Counter((instance,))
        if rests:
            self._rests = {one: until for one, until in self._rests.items() if until > now} | {instance: now + REST}
