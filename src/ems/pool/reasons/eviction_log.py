"""Which keys are gone, since when and why: the last :data:`CAPACITY` of them.

A brain.  What always holds: of the last ``capacity`` notes the newest one of each key is known exactly; memory is
bounded (below 168 bytes a note, so 10.5 MiB when full); a note costs the same however many there are.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ems.pool.reasons.words import Reason

CAPACITY = 65536
"""Notes that are kept."""
NOBODY = -1

_NOTE = struct.Struct("<QBdh")
"""Name of a key, reason, time, winner."""
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
        self._notes = bytearray(capacity * _NOTE.size)
        self._next = 0
        """Where the next note comes, in place of the oldest."""
        self._places: dict[int, int] = {}
        """Of the newest note of each key."""

    def note(self, namespace: int, key: bytes, code: int, winner: int = NOBODY) -> None:
        """``key`` of ``namespace`` is not there from now on, by the reason ``code``."""
        name, place = _name(namespace, key), self._next
        oldest = _HALF.unpack_from(self._notes, place)[0]
        if self._places.get(oldest) == place:
            del self._places[oldest]
        _NOTE.pack_into(self._notes, place, name, code, self.now, winner)
        self._places[name] = place
        self._next = (place + _NOTE.size) % len(self._notes)

    def code(self, namespace: int, key: bytes) -> int:
        """Why ``key`` of ``namespace`` left, as a code; 0 when that is not known."""
        place = self._places.get(_name(namespace, key))
        return 0 if place is None else self._notes[place + _HALF.size]

    def find(self, namespace: int, key: bytes) -> EvictionRecord | None:
        place = self._places.get(_name(namespace, key))
        if place is None:
            return None
        _, code, at, winner = _NOTE.unpack_from(self._notes, place)
        reason = Reason.of_code(code)
        assert reason is not None
        return EvictionRecord(reason, at, winner)


def _name(namespace: int, key: bytes) -> int:
    half: int = _HALF.unpack_from(key)[0]
    return half ^ (namespace * _SPREAD & _MASK)
