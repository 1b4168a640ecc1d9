"""Two ways of doing the same thing, done in turns: how much longer the one takes.

Pure.  Pairs that were measured right after each other share whatever else the machine did at that time, so the median
of their ratios tells differences of a percent that two separate runs would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

NORMAL_95 = 1.96


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs in short; times in seconds."""

    pairs: int
    base: float
    """Median without."""
    other: float
    """Median with."""
    ratio: float
    """Median of the ratios with/without, one a pair."""
    ratio_low: float
    ratio_high: float
    """Between these two lies the true median with a probability of 95 % (order statistics)."""
    difference: float
    """Median of the differences with minus without."""
    difference_low: float
    difference_high: float
    """Between these two, the same of the differences."""


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Sum up at least one pair of (without, with).

    Raises:
        ValueError: there are no pairs, or a time is not above zero.
    """
    if not pairs:
        raise ValueError("no pairs to compare")
    values = np.asarray(pairs, np.float64)
    if not (values > 0).all():
        raise ValueError("a time of a pair is not above zero")
    ratios = np.sort(values[:, 1] / values[:, 0])
    differences = np.sort(values[:, 1] - values[:, 0])
    low, high = _ranks_of_median(len(ratios))
    base, other = np.median(values, axis=0)
    return Comparison(
        pairs=len(pairs),
        base=float(base),
        other=float(other),
        ratio=float(np.median(ratios)),
        ratio_low=float(ratios[low]),
        ratio_high=float(ratios[high]),
        difference=float(np.median(differences)),
        difference_low=float(differences[low]),
        difference_high=float(differences[high]),
    )


def _ranks_of_median(count: int) -> tuple[int, int]:
    """Ranks (from 0) of the two order statistics that enclose the median with 95 %; all of them where they are few."""
    spread = NORMAL_95 * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - spread), 0)
    return low, count - 1 - low
