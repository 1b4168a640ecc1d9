"""Which request looked for what lately, so that somebody can ask for a request by its id.

A brain.  What always holds: the last :data:`MAX_REQUESTS` requests are known, each with its last :data:`MAX_LOOKS`
lookups, or as many as :data:`MAX_BYTES` hold.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import msgspec

from ems.pool.protocol.limits import MAX_ID

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

    def find(self, request: str) -> tuple[str, list[Look]]:
        """The whole id and the lookups of ``request``, an id or a part that only one has; nothing when there is none.

        Engines add to the id that a client knows, hence the part.
        """
        exact = self._looks.get(request[:MAX_ID])
        if exact is not None:
            return request[:MAX_ID], list(exact)
        alike = [name for name in self._looks if request and request in name]
        return (alike[0], list(self._looks[alike[0]])) if len(alike) == 1 else ("", [])


def _size(look: Look) -> int:
    return _LOOK_BYTES + sys.getsizeof(look.namespace)
