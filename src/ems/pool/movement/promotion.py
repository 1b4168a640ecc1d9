"""What is to be fetched from tiers: first what was looked up, then what was announced, never too much at once.

A brain.  A want is a run of keys that a tier has and memory has not.  It is cut into portions; each is reserved in
memory like any writer's pages, so that everybody sees its keys as being written, then fetched, then committed.  What
always holds: the portions under way are never more than the limit (but for a single page); a want that waited too long
is let go; a want is queued once; what waits is bounded, that of each tenant and all; tenants take turns, each with what
was looked up first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

MAX_WANTS = 1024
"""Wants of one tenant that wait at most; more are not taken."""
MAX_ALL_WANTS = 2 * MAX_WANTS
"""The same of all tenants."""
MAX_WANTED = 1 << 20
"""Keys that all wants may name together (64 bytes each)."""
MAX_WANTED_TENANT = 1 << 18
"""Keys that the wants of one tenant may name; on an open node there is one tenant."""
PATIENCE = 30.0
"""Seconds after which a want that nobody repeated is let go."""


class Portion(msgspec.Struct, frozen=True):
    """Keys to be reserved behind ``parent`` and fetched from tier number ``tier``."""

    tier: int
    namespace: int
    parent: bytes
    keys: tuple[bytes, ...]
    size: int


class _Want(msgspec.Struct):
    tier: int
    namespace: int
    page_size: int
    parent: bytes
    keys: deque[bytes]
    tenant: str
    at: float
    urgent: bool


class Promotions:
    """All wants of a node.  ``limit`` are the bytes that may be under way, ``batch`` those of one portion of a tier.

    ``tenant`` tells whose a namespace is.
    """

    def __init__(self, limit: int, batch: Callable[[int], int], tenant: Callable[[int], str] = lambda _: "") -> None:
        self._tenant = tenant
        self._limit = limit
        self._batch = batch
        self._wants: OrderedDict[tuple[int, bytes], _Want] = OrderedDict()
        """By namespace and first key; in the order in which they came."""
        self._waiting: Counter[tuple[int, bool]] = Counter()
        """Bytes that wait, by tier, those that are urgent by themselves."""
        self._wanted: Counter[str] = Counter()
        """Keys that wait, by tenant."""
        self._served: dict[str, int] = {}
        """The last turn of each tenant, since something waits."""
        self._turn = 0
        self.under_way = 0
        """Bytes that were handed out and have not ended."""

    def __len__(self) -> int:
        return len(self._wants)

    def waiting(self, tier: int, *, urgent: bool = False) -> int:
        """Bytes that wait to be fetched from ``tier``; with ``urgent`` those only that go before others."""
        return self._waiting[tier, True] + (0 if urgent else self._waiting[tier, False])

    def ask(
        self,
        tier: int,
        namespace: int,
        page_size: int,
        parent: bytes,
        keys: Sequence[bytes],
        now: float,
        *,
        urgent: bool,
    ) -> bool:
        """Fetch ``keys``, consecutive blocks behind ``parent``; False when too many wait already."""
        name, tenant = (namespace, keys[0]), self._tenant(namespace)
        want = self._wants.get(name)
        more = len(keys) - len(want.keys) if want is not None else len(keys)
        if want is None:
            if self._is_full(tenant) or self._too_many(tenant, more):
                return False
            want = self._wants[name] = _Want(tier, namespace, page_size, parent, deque(keys), tenant, now, urgent)
            self._count(want, more)
        elif more > 0 and want.tier == tier and not self._too_many(tenant, more):
            self._count(want, more)
            want.keys = deque(keys)
        want.at = now
        if urgent and not want.urgent:
            size = len(want.keys) * want.page_size
            self._waiting[want.tier, False] -= size
            self._waiting[want.tier, True] += size
            want.urgent = True
        return True

    def _is_full(self, tenant: str) -> bool:
        count = len(self._wants)
        own = sum(want.tenant == tenant for want in self._wants.values()) if count >= MAX_WANTS else 0
        return own >= MAX_WANTS or count >= MAX_ALL_WANTS

    def _too_many(self, tenant: str, more: int) -> bool:
        return self._wanted[tenant] + more > MAX_WANTED_TENANT or self._wanted.total() + more > MAX_WANTED

    def _count(self, want: _Want, keys: int) -> None:
        self._waiting[want.tier, want.urgent] += keys * want.page_size
        self._wanted[want.tenant] += keys
        if not self._wanted[want.tenant]:
            del self._wanted[want.tenant]

    def next(self, now: float) -> Portion | None:
        """The next portion, which is under way from now on; None while nothing waits or enough is under way."""
        self._drop([name for name, want in self._wants.items() if now - want.at >= PATIENCE])
        if not self._wants:
            self._served.clear()
            return None
        name = self._first()
        want = self._wants[name]
        room = (self._limit - self.under_way) // want.page_size
        if room <= 0 and self.under_way:
            return None
        count = min(max(self._batch(want.tier) // want.page_size, 1), max(room, 1), len(want.keys))
        keys = tuple(want.keys.popleft() for _ in range(count))
        size = count * want.page_size
        portion = Portion(want.tier, want.namespace, want.parent, keys, size)
        self._count(want, -count)
        self.under_way += size
        self._turn += 1
        self._served[want.tenant] = self._turn
        del self._wants[name]
        if want.keys and (want.namespace, want.keys[0]) in self._wants:
            self._count(want, -len(want.keys))  # somebody asked for the rest by itself
        elif want.keys:
            # At its old place: a request is served best when its blocks come together.
            want.parent, rest = keys[-1], (want.namespace, want.keys[0])
            self._wants[rest] = want
            self._wants.move_to_end(rest, last=False)
        return portion

    def _first(self) -> tuple[int, bytes]:
        """Which want is next: an urgent one if there is any, of the tenant whose last turn is longest ago."""
        turns = {tenant: self._served.get(tenant, 0) for tenant in self._wanted}
        best = min(turns.values())
        found: dict[tuple[bool, int], tuple[int, bytes]] = {}
        for name, want in self._wants.items():
            order = not want.urgent, turns[want.tenant]
            if order not in found:
                found[order] = name
                if order == (False, best):
                    break
        return found[min(found)]

    def ended(self, portion: Portion) -> None:
        self.under_way -= portion.size

    def no_room(self, portion: Portion) -> None:
        """Memory had no room for ``portion``: what comes behind it is of no use either."""
        behind = (portion.namespace, portion.keys[-1])
        self._drop([name for name, want in self._wants.items() if (want.namespace, want.parent) == behind])

    def cut(self, tier: int) -> None:
        self._drop([name for name, want in self._wants.items() if want.tier == tier])

    def wants(self, namespace: int, key: bytes) -> bool:
        return (namespace, key) in self._wants

    def forget(self, namespace: int) -> None:
        self._drop([name for name in self._wants if name[0] == namespace])

    def _drop(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            want = self._wants.pop(name)
            self._count(want, -len(want.keys))
