"""What the default policy learns: how long pages take to be used again, and what keeping them is worth.

Time is counted in epochs, each about an eighth of the capacity in pages touched.  A sampled key is followed from one
use to the next, whether its page stays in the pool or not, so what is learned does not depend on what was evicted.
What always holds: a life is counted once at its start, once in each span of ages that it reaches, and once when the
key is used again; memory is bounded by :data:`FOLLOWED` or a share of the capacity; old observations fade.

Worth are the uses that a page will bring for each epoch in which it takes up a slot.  A page of a class and age is kept
until some later age at best; its worth is the chance that it is used by then, divided by the time that it is expected
to stay.  The best choice of that age gives the Gittins index: with it, the page worth least is the right one to evict
where pages come back independently of each other.  Nothing has to be set for this: with uses that grow rarer with age
it is LRU within each class, with loops longer than the pool it keeps some pages and lets new ones go, and a class that
is never used again goes first.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt

MOST_USES = 63
"""Uses that are told apart."""
_PLACE_AND_TAG = struct.Struct("<IH").unpack_from
"""What of a key says where its uses are kept, and of which the upper ten bits are kept with them."""
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

EDGES = [0]
"""Where spans of ages begin: one epoch each at first, then each a quarter longer than the one before."""
while EDGES[-1] < OLDEST:
    EDGES.append(max(EDGES[-1] + 1, int(EDGES[-1] * 1.3)))
SPAN_OF_AGE = [span for span, edge in enumerate(EDGES) for _ in range(edge, [*EDGES, OLDEST + 1][span + 1])]
"""The span of each age in epochs up to the last."""

PRIOR_LIVES = 20.0
"""Lives that speak for what is known of all classes, beside those that were seen of one."""

_WIDTHS = np.diff([*EDGES, 2 * EDGES[-1]]).astype(float)
_SHAPE = _WIDTHS / (np.array(EDGES, dtype=float) + EPOCHS_OF_CAPACITY)
"""How the chance of a use in each span falls with age where nothing was seen, so that the oldest leave first."""
_ASSUMED = 0.02
"""Chance of a use in the first span, by that shape, before anything was seen."""
_BACKWARDS = np.tril(np.ones((len(EDGES), len(EDGES)), dtype=bool), -1)


class UseMemory:
    """How often pages were used that left: a table of two bytes for each of about the ``entries`` that left last.

    A key has one place in the table, and a later key may take it; a tag of ten bits tells the two apart but for one
    time in a thousand.  That is as good as a list of keys and takes a fiftieth of its memory.
    """

    def __init__(self, entries: int) -> None:
        self._table = array("H", bytes(2 * max(entries, 1)))

    def __len__(self) -> int:
        return len(self._table)

    def put(self, key: bytes, uses: int) -> None:
        place, tag = _PLACE_AND_TAG(key)
        self._table[place % len(self._table)] = tag & ~MOST_USES | min(uses, MOST_USES)

    def get(self, key: bytes) -> int:
        """Uses of the page of ``key`` when it left; 0 when that is not known."""
        place, tag = _PLACE_AND_TAG(key)
        entry = self._table[place % len(self._table)]
        return entry & MOST_USES if (entry ^ tag) <= MOST_USES else 0


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


def worth_by_age(again: npt.NDArray[np.float64], reached: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Worth of a page of each class (row) in each span of ages (column).

    ``again`` and ``reached`` are the lives that ended with a use in the span and those that reached it.
    """
    of_all = _of_all(again.sum(axis=0).tolist(), reached.sum(axis=0).tolist())
    chance = np.minimum((again + PRIOR_LIVES * of_all) / (reached + PRIOR_LIVES), 0.98)
    start = np.ones((len(chance), 1))
    unused = np.concatenate([start, np.cumprod(1 - chance, axis=1)], axis=1)
    stay = np.cumsum(unused[:, :-1] * _WIDTHS * (1 - chance / 2), axis=1)
    time = np.concatenate([0 * start, stay], axis=1)
    # From the span of the row to the end of that of the column.
    uses = unused[:, :-1, None] - unused[:, None, 1:]
    epochs = np.maximum(time[:, None, 1:] - time[:, :-1, None], 1e-12)
    best: npt.NDArray[np.float64] = np.where(_BACKWARDS, 0.0, uses / epochs).max(axis=2)
    return best


def _of_all(again: list[float], reached: list[float]) -> npt.NDArray[np.float64]:
    """Chance of a use in each span over all classes; of ages that few have reached it is what younger ones suggest."""
    chances = []
    level = _ASSUMED
    for shape, used, lives in zip(_SHAPE.tolist(), again, reached, strict=True):
        chance = (used + PRIOR_LIVES * min(level * shape, 1.0)) / (lives + PRIOR_LIVES)
        level = chance / shape
        chances.append(chance)
    return np.array(chances)
