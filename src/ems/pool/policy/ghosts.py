"""Keys of pages that left, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """A bounded set of keys in the order in which they came."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def take(self, key: bytes) -> bool:
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def shrink(self, count: int) -> None:
        while len(self._keys) > max(count, 0):
            self._keys.popitem(last=False)
