"""How the blocks that a caller names by integers are named in the pool, and which block comes before which.

A hash names a block together with its whole prefix, but not how many of its tokens are there.  So that a
page never claims more than it holds, a whole block and the beginning of one have different keys; of the
beginnings the pool keeps one a hash, and the page itself says how many tokens it has.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from ems.pool.keys import NO_PARENT, BlockKey, integer_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REMEMBERED = 1 << 16
"""How many blocks' keys are kept, and of how many at least the block before is remembered."""


class BlockNames:
    """Keys of one namespace.  Safe for several threads."""

    def __init__(self, namespace: str) -> None:
        beginnings = f"{namespace}/beginning"
        self.whole: Callable[[int], BlockKey] = lru_cache(REMEMBERED)(lambda value: integer_key(value, namespace))
        """The key of a block with all of its tokens."""
        self.beginning: Callable[[int], BlockKey] = lru_cache(REMEMBERED // 16)(
            lambda value: integer_key(value, beginnings)
        )
        """The key of a block that has only its first tokens."""
        self._lock = threading.Lock()
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def key(self, value: int, *, whole: bool) -> BlockKey:
        return self.whole(value) if whole else self.beginning(value)

    def remember(self, hashes: Sequence[int]) -> None:
        """``hashes`` are consecutive blocks: each comes before the next one."""
        with self._lock:
            self._young.update(zip(hashes[1:], hashes, strict=False))
            if len(self._young) > REMEMBERED:
                self._old, self._young = self._young, {}

    def before(self, value: int) -> BlockKey:
        """The key of the block before ``value``, as far as it is remembered.

        It only tells the pool what hangs on what: where it is not known, eviction is less exact, no more.
        """
        with self._lock:
            parent = self._young.get(value, self._old.get(value))
        return NO_PARENT if parent is None else self.whole(parent)
