"""What keeping a page is worth: the uses that it will bring for each epoch in which it takes up a slot.

A page of a class and age is kept until some later age at best; its worth is the chance that it is used by then, divided
by the time that it is expected to stay.  The best choice of that age gives the Gittins index: with it, the page worth
least is the right one to evict where pages come back independently of each other.  Nothing has to be set for this: with
uses that grow rarer with age it is LRU within each class, with loops longer than the pool it keeps some pages and lets
new ones go, and a class that is never used again goes first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ems.pool.policy.history import EDGES, EPOCHS_OF_CAPACITY

PRIOR_LIVES = 20.0
"""Lives that speak for what is known of all classes, beside those that were seen of one."""

_WIDTHS = np.diff([*EDGES, 2 * EDGES[-1]]).astype(float)
_SHAPE = _WIDTHS / (np.array(EDGES, dtype=float) + EPOCHS_OF_CAPACITY)
"""How the chance of a use in each span falls with age where nothing was seen, so that the oldest leave first."""
_ASSUMED = 0.02
"""Chance of a use in the first span, by that shape, before anything was seen."""
_BACKWARDS = np.tril(np.ones((len(EDGES), len(EDGES)), dtype=bool), -1)


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
