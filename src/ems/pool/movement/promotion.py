"""What is to be fetched from tiers: first what was looked up, then what was announced, never too much at once.

A brain.  A want is a run of keys that a tier has and memory has not.  It is cut into portions; each is reserved in
memory like any writer's pages, so that everybody sees its keys as being written, then fetched, then committed.  What
always holds: the portions under way are never more than the limit (but for a single page); a want that waited too long
is let go; a want is queued once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from ems.pool.keys import Tail

MAX_WANTS = 1024
"""Wants that wait at most; more are not taken."""
PATIENCE = 30.0
"""Seconds after which a want that nobody repeated is let go."""


class Portion(msgspec.Struct, frozen=True):
    """Keys to be reserved behind ``parent`` and fetched from tier number ``tier``."""

    tier: int
    namespace: int
    parent: bytes
    keys: tuple[bytes, ...]
    tail: Tail | None
    size: int


class _Want:
    __slots__ = ("at", "keys", "namespace", "page_size", "parent", "tail", "tier", "urgent")

    def __init__(
        self, tier: int, namespace: int, page_size: int, parent: bytes, keys: Sequence[bytes], tail: Tail | None
    ) -> None:
        self.tier = tier
        self.namespace = namespace
        self.page_size = page_size
        self.parent = parent
        self.keys = list(keys)
        self.tail = tail
        self.at = 0.0
        self.urgent = False


class Promotions:
    """All wants of a node.  ``limit`` are the bytes that may be under way, ``batch`` those of one portion."""

    def __init__(self, limit: int, batch: int) -> None:
        self._limit = limit
        self._batch = batch
        self._wants: OrderedDict[tuple[int, bytes], _Want] = OrderedDict()
        """By namespace and first key; in the order in which they came."""
        self._waiting: dict[int, int] = {}
        """Bytes that wait, by tier."""
        self.under_way = 0
        """Bytes that were handed out and have not ended."""
        self.given_up = 0
        """Wants that waited too long or found the queue full."""

    def __len__(self) -> int:
        return len(self._wants)

    def waiting(self, tier: int) -> int:
        """Bytes that wait to be fetched from ``tier``."""
        return self._waiting.get(tier, 0)

    def ask(
        self,
        tier: int,
        namespace: int,
        page_size: int,
        parent: bytes,
        keys: Sequence[bytes],
        now: float,
        *,
        tail: Tail | None = None,
        urgent: bool,
    ) -> bool:
        """Fetch ``keys``, consecutive blocks behind ``parent``; False when too many wait already."""
        name = (namespace, keys[0])
        want = self._wants.get(name)
        if want is None:
            if len(self._wants) >= MAX_WANTS:
                self.given_up += 1
                return False
            want = self._wants[name] = _Want(tier, namespace, page_size, parent, keys, tail)
            self._count(want.tier, len(keys) * page_size)
        elif len(keys) > len(want.keys) and want.tier == tier:
            self._count(tier, (len(keys) - len(want.keys)) * page_size)
            want.keys = list(keys)
        want.at = now
        want.urgent = want.urgent or urgent
        return True

    def _count(self, tier: int, size: int) -> None:
        self._waiting[tier] = self._waiting.get(tier, 0) + size

    def next(self, now: float) -> Portion | None:
        """The next portion, which is under way from now on; None while nothing waits or enough is under way."""
        self._give_up_old(now)
        if not self._wants:
            return None
        name = next((name for name, want in self._wants.items() if want.urgent), next(iter(self._wants)))
        want = self._wants[name]
        room = self._limit - self.under_way
        count = min(max(self._batch // want.page_size, 1), room // want.page_size, len(want.keys))
        if count <= 0:
            if self.under_way:
                return None
            count = 1
        keys, left = want.keys[:count], want.keys[count:]
        size = count * want.page_size
        portion = Portion(want.tier, want.namespace, want.parent, tuple(keys), want.tail, size)
        self._count(want.tier, -size)
        self.under_way += size
        del self._wants[name]
        if not left:
            return portion
        rest = (want.namespace, left[0])
        if rest in self._wants:
            # Somebody asked for the rest by itself.
            self._count(want.tier, -len(left) * want.page_size)
            return portion
        # At its old place: a request is served best when its blocks come together.
        want.keys, want.parent = left, keys[-1]
        self._wants[rest] = want
        self._wants.move_to_end(rest, last=False)
        return portion

    def ended(self, portion: Portion) -> None:
        """The portion is there, or will not be."""
        self.under_way -= portion.size

    def no_room(self, portion: Portion) -> None:
        """Memory had no room for ``portion``: what comes behind it is of no use either."""
        follows = [
            name
            for name, want in self._wants.items()
            if want.namespace == portion.namespace and want.parent == portion.keys[-1]
        ]
        self._drop(follows)

    def cut(self, tier: int) -> None:
        """``tier`` is not to be asked any more."""
        self._drop([name for name, want in self._wants.items() if want.tier == tier])

    def wants(self, namespace: int, key: bytes) -> bool:
        """Whether a run that waits begins with ``key``."""
        return (namespace, key) in self._wants

    def forget(self, namespace: int) -> None:
        """Nothing of ``namespace`` is wanted any more."""
        self._drop([name for name in self._wants if name[0] == namespace])

    def _give_up_old(self, now: float) -> None:
        old = [name for name, want in self._wants.items() if now - want.at >= PATIENCE]
        self.given_up += len(old)
        self._drop(old)

    def _drop(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            want = self._wants.pop(name)
            self._count(want.tier, -len(want.keys) * want.page_size)

    def check(self) -> list[str]:
        """What does not hold, one sentence each; empty when all is well."""
        broken = []
        for tier, size in self._waiting.items():
            wanted = sum(len(want.keys) * want.page_size for want in self._wants.values() if want.tier == tier)
            if size != wanted:
                broken.append(f"{size} bytes of tier {tier} are said to wait, {wanted} do")
        if self.under_way < 0:
            broken.append("more ended than was under way")
        return broken
