"""What a node knows about misses: asked at each lookup that found less than it wanted.

A brain.  What always holds: a lookup counts one miss at most, with the reason of its first missing key; finding it
costs the same however much the node holds or remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ems.pool.names import Layouts
from ems.pool.pages import Page
from ems.pool.protocol.messages import Explained
from ems.pool.reasons.eviction_log import NOBODY, EvictionLog
from ems.pool.reasons.requests import Requests
from ems.pool.reasons.words import CODES, Reason

MAX_SHOWN = 8
"""Other layouts that one explanation shows."""


class MissReasons:
    """All that is known about misses.  ``holds(name)`` tells how many pages the namespace of that name has."""

    def __init__(self, holds: Callable[[str], int]) -> None:
        self._holds = holds
        self.eviction_log = EvictionLog()
        self.layouts = Layouts()
        self.requests = Requests()
        self._misses = [0] * CODES

    def tick(self, now: float) -> None:
        self.eviction_log.now = now

    @property
    def misses(self) -> dict[str, int]:
        """Lookups that missed something, by the reason of their first missing key."""
        counts = ((Reason.of_code(code), count) for code, count in enumerate(self._misses) if count)
        return {reason.value: count for reason, count in counts if reason is not None}

    def missed(self, number: int, name: str, index: Mapping[bytes, Page], key: bytes) -> int:
        """A lookup's first missing key is ``key``: count it and say why, as a code."""
        code = self.why(number, name, index, key)
        self._misses[code] += 1
        return code

    def revise(self, before: int, after: int, request: str = "") -> int:
        """The miss that was counted as ``before``, by ``request``, is better known by now: it is ``after``."""
        self._misses[before] -= 1
        self._misses[after] += 1
        if request:
            self.requests.revise(request, after)
        return after

    def missed_namespace(self, name: str) -> int:
        """A lookup asked for a namespace that is not there: count it and say why, as a code."""
        code = self._absent(name, None)
        self._misses[code] += 1
        return code

    def why(self, number: int, name: str, index: Mapping[bytes, Page], key: bytes) -> int:
        """Why ``key``, which cannot be read, is missing, as a code."""
        return self._known(number, index, key) or self._absent(name, index)

    def _known(self, number: int, index: Mapping[bytes, Page], key: bytes) -> int:
        """Why ``key`` is missing, as far as that is known of it; 0 where it is not."""
        page = index.get(key)
        if page is not None:
            # What is there and yet not found is about to leave, on an administrator's word.
            return Reason.CLEARED.code if page.present else Reason.BEING_WRITTEN.code
        return self.eviction_log.code(number, key)

    def _absent(self, name: str, index: Mapping[bytes, Page] | None) -> int:
        """Why all is missing of which nothing is known in the namespace ``name``; looks into its model's others."""
        empty = index is None or not len(index)
        elsewhere = empty and any(self._holds(other) for other in self.layouts.related(name))
        return Reason.OTHER_LAYOUT.code if elsewhere else Reason.NEVER_STORED.code

    def miss_codes(self, number: int, name: str, index: Mapping[bytes, Page] | None, keys: list[bytes]) -> bytes:
        """One code a key, counting nothing: 0 for a page that a lookup of all ``keys`` finds.

        Pages that are there behind a missing one have :attr:`Reason.GAP`.
        """
        absent = self._absent(name, index)
        if index is None:
            return bytes([absent]) * len(keys)
        codes = bytearray(len(keys))
        gap = 0
        for position, key in enumerate(keys):
            page = index.get(key)
            if page is not None and page.present:
                codes[position] = gap
            else:
                codes[position] = self._known(number, index, key) or absent
                gap = Reason.GAP.code
        return bytes(codes)

    def explain(
        self,
        number: int,
        name: str,
        index: Mapping[bytes, Page] | None,
        keys: list[bytes],
        now: float,
        named: Callable[[int], str],
    ) -> Explained:
        """Why each of ``keys`` is there or not, and all that is known of the first that is not.

        ``named`` tells what the namespace of a number is called.
        """
        codes = self.miss_codes(number, name, index, keys)
        code, key = next(((code, key) for code, key in zip(codes, keys, strict=True) if code), (0, b""))
        if code == Reason.OTHER_LAYOUT.code:
            others = [other for other in self.layouts.related(name) if self._holds(other)][:MAX_SHOWN]
            return Explained(codes, layouts=[self.layouts.differences(name, other) for other in others])
        departure = self.eviction_log.find(number, key) if code else None
        if departure is None or departure.reason.code != code:
            return Explained(codes)
        winner = "" if departure.winner == NOBODY else named(departure.winner)
        return Explained(codes, max(now - departure.at, 0.0), winner)
