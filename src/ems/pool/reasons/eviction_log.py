"""Which keys are gone, since when and why: the last :data:`CAPACITY` of them.

A brain.  What always holds: of the last ``capacity`` notes the newest one of each key is known exactly; memory is
bounded (below 168 bytes a note, so 10.5 MiB when full); a note costs the same however many there are.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

from ems.pool.reasons.words import Reason

CAPACITY = 65536
"""Notes that are kept."""
NOBODY = -1

_HALF = struct.Struct("<Q")
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class EvictionRecord(NamedTuple):
    """Why and when a key left or was not let in, and for which namespace (:data:`NOBODY`: for none)."""

    reason: Reason
    at: float
    winner: int


class EvictionLog:
    """Notes of one node.  Namespaces are numbers; keys count by namespace and their first 8 bytes."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.now = 0.0
        """The time that notes get; whoever owns this sets it now and then."""
        self._capacity = capacity
        self._cursor = 0
        self._positions: dict[int, int] = {}
        self._names = array("Q")
        self._codes = bytearray()
        self._times = array("d")
        self._winners = array("h")

    def note(self, namespace: int, key: bytes, code: int, winner: int = NOBODY) -> None:
        """``key`` of ``namespace`` is not there from now on, by the reason ``code``."""
        name = _HALF.unpack_from(key)[0] ^ (namespace * _SPREAD & _MASK)
        cursor = self._cursor
        if len(self._names) < self._capacity:
            self._names.append(name)
            self._codes.append(code)
            self._times.append(self.now)
            self._winners.append(winner)
        else:
            forgotten = self._names[cursor]
            if self._positions[forgotten] == cursor:
                del self._positions[forgotten]
            self._names[cursor] = name
            self._codes[cursor] = code
            self._times[cursor] = self.now
            self._winners[cursor] = winner
        self._positions[name] = cursor
        self._cursor = cursor + 1 if cursor + 1 < self._capacity else 0

    def code(self, namespace: int, key: bytes) -> int:
        """Why ``key`` of ``namespace`` left, as a code; 0 when that is not known."""
        position = self._positions.get(_HALF.unpack_from(key)[0] ^ (namespace * _SPREAD & _MASK))
        return 0 if position is None else self._codes[position]

    def find(self, namespace: int, key: bytes) -> EvictionRecord | None:
        position = self._positions.get(_HALF.unpack_from(key)[0] ^ (namespace * _SPREAD & _MASK))
        if position is None:
            return None
        reason = Reason.of_code(self._codes[position])
        assert reason is not None
        return EvictionRecord(reason, self._times[position], self._winners[position])
