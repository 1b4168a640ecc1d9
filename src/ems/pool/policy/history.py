"""How long it takes until pages of a class are used again, learned from a sample of the keys.

Time is counted in epochs, each about an eighth of the capacity in pages touched.  A sampled key is followed from one
use to the next, whether its page stays in the pool or not, so what is learned does not depend on what was evicted.
What always holds: a life is counted once at its start, once in each span of ages that it reaches, and once when the key
is used again; memory is bounded by :data:`FOLLOWED` or a share of the capacity; old observations fade.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt

EPOCHS_OF_CAPACITY = 8
"""Epochs in which as many pages are touched as the capacity holds."""
OLDEST = 32 * EPOCHS_OF_CAPACITY
"""Epochs after which the age of a page no longer matters."""
FOLLOWED = 1 << 14
"""Keys that are followed at least, where so many come."""
FOLLOWED_SHARE = 4
"""Keys that are followed at most: the capacity divided by this, or :data:`FOLLOWED`."""
REACH = 16
"""Capacities worth of different keys that the followed ones stand for."""
_EPOCH_BITS = 40
_EPOCH = (1 << _EPOCH_BITS) - 1


def spans_of_age() -> list[int]:
    """Where spans of ages begin: one epoch each at first, then each a quarter longer than the one before."""
    edges = [0]
    while edges[-1] < OLDEST:
        edges.append(max(edges[-1] + 1, int(edges[-1] * 1.3)))
    return edges


EDGES = spans_of_age()
SPAN_OF_AGE = [span for span, edge in enumerate(EDGES) for _ in range(edge, [*EDGES, OLDEST + 1][span + 1])]
"""The span of each age in epochs up to the last."""


class ReuseHistory:
    """Lives of sampled keys of ``classes`` classes, for a pool of ``capacity`` pages."""

    def __init__(self, classes: int, capacity: int) -> None:
        self._most = max(FOLLOWED, capacity // FOLLOWED_SHARE)
        wanted = max(REACH * capacity // self._most, 1)
        self.mask = (1 << (wanted - 1).bit_length()) - 1
        """Keys whose last two bytes have none of these bits are followed."""
        self._followed: OrderedDict[bytes, int] = OrderedDict()
        self._alive: Counter[int] = Counter()
        self.epoch = 0
        shape = (classes, len(EDGES))
        self.again: npt.NDArray[np.float64] = np.zeros(shape)
        """Lives that ended with a use, by class and span of age."""
        self.reached: npt.NDArray[np.float64] = np.zeros(shape)
        """Lives that reached the span."""

    def see(self, key: bytes, kind: int) -> None:
        """The page of ``key`` was used or stored and is of the class ``kind`` from now on."""
        if int.from_bytes(key[-2:]) & self.mask:
            return
        before = self._followed.pop(key, None)
        if before is not None:
            self._leave(before)
            age = self.epoch - (before & _EPOCH)
            self.again[before >> _EPOCH_BITS, SPAN_OF_AGE[min(age, OLDEST)]] += 1
        now = kind << _EPOCH_BITS | self.epoch
        self._followed[key] = now
        self._alive[now] += 1
        self.reached[kind, 0] += 1
        if len(self._followed) > self._most:
            self._leave(self._followed.popitem(last=False)[1])

    def _leave(self, life: int) -> None:
        left = self._alive[life] - 1
        if left:
            self._alive[life] = left
        else:
            del self._alive[life]

    def next_epoch(self) -> None:
        self.epoch += 1
        alive = self._alive
        for span, edge in enumerate(EDGES[1:], start=1):
            epoch = self.epoch - edge
            if epoch < 0:
                return
            for kind in range(len(self.reached)):
                count = alive.get(kind << _EPOCH_BITS | epoch)
                if count:
                    self.reached[kind, span] += count

    def fade(self, keep: float) -> None:
        """Let what was observed count less by the factor ``keep``."""
        self.again *= keep
        self.reached *= keep
