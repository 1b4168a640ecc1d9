"""What the SDK did lately, as one line for the log every 30 seconds.

A brain: it gets samples and the time, and answers with the line when one is due.  An interval in which
nothing happened has no line, so an idle engine's log stays quiet.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from enum import Enum
from functools import partial

import msgspec

MOST_SAMPLES = 1 << 16
"""Samples of each kind that count for one line; beyond, the oldest are left out."""


class Kind(Enum):
    """What was done."""

    LOOKUP = "lookup"
    LOAD = "load"
    SAVE = "save"


class Sample(msgspec.Struct, frozen=True):
    """One operation that ended: ``done`` of ``total`` blocks in ``seconds``."""

    kind: Kind
    done: int
    total: int
    seconds: float


def _spread(numbers: list[float], digits: int) -> str:
    """``average/least/most`` with ``digits`` decimals, the average with at least one."""
    average = sum(numbers) / len(numbers)
    return f"{average:.{max(digits, 1)}f}/{min(numbers):.{digits}f}/{max(numbers):.{digits}f}"


class Summary:
    """Collects samples from ``now`` on; :attr:`next_line` says when the next line is due."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self.next_line = now + seconds
        self._samples: defaultdict[Kind, deque[Sample]] = defaultdict(partial(deque, maxlen=MOST_SAMPLES))

    def add(self, sample: Sample) -> None:
        self._samples[sample.kind].append(sample)

    def line(self, now: float) -> str | None:
        """The line for the interval that ended, None when none is due or nothing happened."""
        if now < self.next_line:
            return None
        self.next_line = now + self._seconds
        if not self._samples:
            return None
        parts = [_transfers(kind, self._samples[kind]) for kind in (Kind.LOAD, Kind.SAVE)]
        line = ", ".join([*parts, _lookups(self._samples[Kind.LOOKUP])])
        self._samples.clear()
        return line


def _transfers(kind: Kind, samples: Collection[Sample]) -> str:
    if not samples:
        return f"{kind.value}s 0"
    blocks = _spread([sample.done for sample in samples], 0)
    milliseconds = _spread([sample.seconds * 1000 for sample in samples], 1)
    return f"{kind.value}s {len(samples)} (blocks {blocks}, ms {milliseconds})"


def _lookups(samples: Collection[Sample]) -> str:
    asked, found = sum(sample.total for sample in samples), sum(sample.done for sample in samples)
    if not asked:
        return f"lookups {len(samples)}"
    return f"lookups {len(samples)}, hit rate {100 * found / asked:.1f}% ({found} of {asked} blocks)"
