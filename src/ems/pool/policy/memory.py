"""How often pages were used that left: a table of two bytes an entry.

A key has one place in the table, and a later key may take it; a tag of ten bits tells the two apart but for one time in
a thousand.  That is as good as a list of keys and takes a fiftieth of its memory.
"""

from __future__ import annotations

from array import array

MOST_USES = 63
"""Uses that are told apart."""
_USE_BITS = 6


class UseMemory:
    """Uses of about as many pages as it has entries, those that left last."""

    def __init__(self, entries: int) -> None:
        self._table = array("H", bytes(2 * max(entries, 1)))

    def __len__(self) -> int:
        return len(self._table)

    def put(self, key: bytes, uses: int) -> None:
        self._table[int.from_bytes(key[:6]) % len(self._table)] = self._tag(key) | min(uses, MOST_USES)

    def get(self, key: bytes) -> int:
        """Uses of the page of ``key`` when it left; 0 when that is not known."""
        entry = self._table[int.from_bytes(key[:6]) % len(self._table)]
        return entry & MOST_USES if entry & ~MOST_USES == self._tag(key) else 0

    @staticmethod
    def _tag(key: bytes) -> int:
        return (key[6] << 2 | key[7] & 3) << _USE_BITS
