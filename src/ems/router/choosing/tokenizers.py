"""Which instance is asked for the token ids of a prompt.  A brain.

What always holds: one that was late, or broke off, is not asked for :data:`REST` seconds and so delays few requests,
after a long question for long ones alone; that says nothing of what it can do for requests, so no breaker is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ems.router.fleet import Instance

REST: Final = 1.0

SHORT: Final = 64 << 10
"""Bytes of a question; who is late with a longer one may be in time with others."""


class Tokenizers:
    """Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._asking: Counter[Instance] = Counter()
        self._rests: dict[tuple[Instance, bool], float] = {}
        """Until when one is asked nothing, or nothing long."""

    def begin(self, usable: Sequence[Instance], size: int, now: float) -> Instance | None:
        """Return who is asked a question of ``size`` bytes now, if anybody; each time is ended by :meth:`end`.

        It is the one with the least to do.
        """
        kinds = (False, True) if size > SHORT else (False,)
        asked = [one for one in usable if all(self._rests.get((one, kind), now) <= now for kind in kinds)]
        if not asked:
            return None
        least = min(asked, key=lambda one: (one.breaker.doubted, self._asking[one], one.running, one.turn))
        self._asking[least] += 1
        return least

    def end(self, instance: Instance, size: int, now: float, *, rests: bool) -> None:
        self._asking -= Counter((instance,))
        if rests:
            self._rests = {one: until for one, until in self._rests.items() if until > now}
            self._rests[instance, size > SHORT] = now + REST
