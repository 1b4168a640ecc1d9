"""Which pages were copied ahead and not used yet, and how many more may be copied.

A brain; times are seconds on one monotonic clock.  What always holds: who asks for room before each copy has no more
bytes of them unused than it allows all tenants, and each of them; so nobody loses more than that to copies that are of
no use.  Memory is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ems.pool.names import tenant_of

MOST_UNUSED: Final = 1 << 16
"""Pages that are remembered."""
LOOK_SECONDS: Final = 60.0
"""When it is looked whether a copy is still in memory, for the first time and again; it has come by then, or never."""
MOST_LOOKS: Final = 512
"""Pages that are looked for in one go."""

_Name = tuple[str, bytes]


class _Copy(NamedTuple):
    size: int
    looked: float
    """When it was asked for, or seen last."""


class UnusedCopies:
    """The copies of one node."""

    def __init__(self) -> None:
        self._pages: OrderedDict[_Name, _Copy] = OrderedDict()
        """Those that were not looked for the longest first."""
        self._bytes: Counter[str] = Counter()
        """Of each tenant."""

    def has(self, namespace: str, key: bytes) -> bool:
        return (namespace, key) in self._pages

    def room(self, namespace: str, page_size: int, most: int, tenants: int = 1) -> int:
        """How many pages of ``page_size`` bytes may be copied into ``namespace``.

        All tenants together may have ``most`` bytes of unused copies, and each its part of that by the number of
        ``tenants``.
        """
        left = min(most // tenants - self._bytes[tenant_of(namespace)], most - self._bytes.total())
        return max(min(left // page_size, MOST_UNUSED - len(self._pages)), 0)

    def add(self, namespace: str, keys: Iterable[bytes], page_size: int, now: float) -> None:
        """``keys``, pages of ``page_size`` bytes, are being copied."""
        for key in keys:
            self._drop((namespace, key))
            self._pages[namespace, key] = _Copy(page_size, now)
            self._bytes[tenant_of(namespace)] += page_size

    def discard(self, namespace: str, keys: Iterable[bytes]) -> int:
        """``keys`` are used, or were fetched or saved by somebody else; how many were copies until now."""
        return sum(self._drop((namespace, key)) for key in keys) if self._pages else 0

    def clear(self, matches: Callable[[str], bool]) -> None:
        """What is left of namespaces that are ``matches`` counts as no copy."""
        for name in [name for name in self._pages if matches(name[0])]:
            self._drop(name)

    def look(self, here: Callable[[str, bytes], bool], now: float) -> None:
        """Forget those that are not ``here`` any more."""
        for _ in range(min(MOST_LOOKS, len(self._pages))):
            name, copy = next(iter(self._pages.items()))
            if now < copy.looked + LOOK_SECONDS:
                return
            if here(*name):
                self._pages[name] = _Copy(copy.size, now)
                self._pages.move_to_end(name)
            else:
                self._drop(name)

    def _drop(self, name: _Name) -> bool:
        copy = self._pages.pop(name, None)
        if copy is None:
            return False
        tenant = tenant_of(name[0])
        self._bytes[tenant] -= copy.size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        return True
