"""What a node knows about misses: asked at each lookup that found less than it wanted, and by who asks for a request.

A brain.  What always holds: a lookup counts one miss at most, with the reason of its first missing key; finding it
costs the same however much the node holds or remembers; the last :data:`MAX_REQUESTS` requests are known, each with its
last :data:`MAX_LOOKS` lookups, or as many as :data:`MAX_BYTES` hold.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from ems.pool.names import Layouts
from ems.pool.pages import Page
from ems.pool.protocol.limits import MAX_ID
from ems.pool.protocol.messages import Explained
from ems.pool.reasons.eviction_log import CAPACITY, NOBODY, EvictionLog
from ems.pool.reasons.words import CODES, Reason

MAX_SHOWN = 8
"""Other layouts that one explanation shows."""
MAX_REQUESTS = 4096
MAX_LOOKS = 8
MAX_BYTES = 8 << 20
"""Bytes of all that is known."""
_REQUEST_BYTES = 300
"""Bytes of a request beside its id: its place and its list."""
_LOOK_BYTES = 250
"""Bytes of a look beside the name of its namespace."""


class Look(msgspec.Struct, frozen=True):
    """One lookup: ``found`` of ``asked`` keys in a row, the first key that was missing and why, as a code."""

    namespace: str
    asked: int
    found: int
    code: int
    missing: bytes
    at: float


class Requests:
    """Lookups by the engine's request ids."""

    def __init__(self) -> None:
        self._looks: OrderedDict[str, list[Look]] = OrderedDict()
        self._bytes = 0

    def looked(self, request: str, look: Look) -> None:
        request = request[:MAX_ID]
        looks = self._looks.get(request)
        if looks is None:
            looks = self._looks[request] = []
            self._bytes += _REQUEST_BYTES + sys.getsizeof(request)
        else:
            self._looks.move_to_end(request)
        looks.append(look)
        self._bytes += _size(look)
        if len(looks) > MAX_LOOKS:
            self._bytes -= _size(looks.pop(0))
        while len(self._looks) > MAX_REQUESTS or self._bytes > MAX_BYTES:
            name, gone = self._looks.popitem(last=False)
            self._bytes -= _REQUEST_BYTES + sys.getsizeof(name) + sum(map(_size, gone))

    def revise(self, request: str, code: int) -> None:
        """The last lookup of ``request`` missed because of ``code``."""
        looks = self._looks.get(request[:MAX_ID])
        if looks:
            looks[-1] = msgspec.structs.replace(looks[-1], code=code)

    def find(self, request: str) -> list[str]:
        """The ids that are meant by ``request``, an id or a part of some, those looked up last at the end.

        Engines add to the id that a client knows, hence the part.
        """
        if request[:MAX_ID] in self._looks:
            return [request[:MAX_ID]]
        return [name for name in self._looks if request and request in name]

    def looks(self, request: str) -> list[Look]:
        """The lookups of a whole id that was found."""
        return list(self._looks[request])


def _size(look: Look) -> int:
    return _LOOK_BYTES + sys.getsizeof(look.namespace)


class MissReasons:
    """All that is known about misses.  ``holds(name)`` tells how many pages the namespace of that name has."""

    def __init__(self, holds: Callable[[str], int], notes: int = CAPACITY) -> None:
        self._holds = holds
        self.eviction_log = EvictionLog(notes)
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
