"""How long work of some size takes, learned from what was done; and whether a tier is quicker than computing again.

A brain, shared by the pool (bytes of a tier) and the engine's cost model (tokens).  What always holds: without enough
fresh measurements nothing is claimed; up to a quarter of the measurements may be anything.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

LEAST_SAMPLES = 5
"""Measurements without which nothing is known."""
SAMPLES = 32
"""Measurements that are kept, of each kind."""
FIT_SECONDS = 0.25
"""A new line is drawn at most this often; it takes about 100 us of a thread that must not be held up."""
TRY_EVERY = 16
"""Of so many in a row that look too dear the last is tried: what was slow once may be quick again."""
FETCHES_LAST_SECONDS = 300.0
"""How long the measurement of a fetch counts."""
_SPREAD = 0.1
"""Two sizes tell a slope only if they differ by this share of the largest."""


class Reluctance:
    """Does what is worth it, and of the rest the last of :data:`TRY_EVERY` in a row."""

    def __init__(self) -> None:
        self.refused = 0
        """How often it was not done."""
        self._in_a_row = 0

    def allows(self, worth: bool) -> bool:
        """Whether to do what is ``worth`` it or not."""
        self._in_a_row = 0 if worth else self._in_a_row + 1
        if self._in_a_row < TRY_EVERY:
            self.refused += not worth
            return worth
        self._in_a_row = 0
        return True


class Line(msgspec.Struct, frozen=True):
    """Seconds that work of some size takes: a fixed part and a part a unit (a token, a byte)."""

    fixed: float
    per_unit: float

    def seconds(self, size: float) -> float:
        return self.fixed + self.per_unit * size


class Samples:
    """The latest measurements of one kind of work, and the line through them.

    The slope is the median of the slopes between any two (Theil and Sen), so that up to a quarter of the measurements
    may be anything.  With ``lasts`` they grow old after so many seconds.
    """

    def __init__(self, lasts: float | None) -> None:
        self._lasts = lasts
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES)
        self._line: Line | None = None
        self._known = True
        self._next_fit = 0.0

    def add(self, size: int, seconds: float, now: float) -> None:
        """Work of ``size`` took ``seconds``; nonsense is left out."""
        if size > 0 and seconds > 0:
            self._samples.append((size, seconds, now))
            self._known = False

    def line(self, now: float, *, draw: bool = True) -> Line | None:
        """The line, None without enough fresh measurements; without ``draw`` the one that was drawn last, if any."""
        while self._lasts is not None and self._samples and self._samples[0][2] < now - self._lasts:
            self._samples.popleft()
            self._known = False
        if len(self._samples) < LEAST_SAMPLES:
            self._line = None
        elif not self._known and (self._line is None or (draw and now >= self._next_fit)):
            self._known = True
            self._next_fit = now + FIT_SECONDS
            self._line = self._fit()
        return self._line

    def _fit(self) -> Line:
        sizes, seconds, _ = np.array(self._samples, dtype=np.float64).T
        first, second = np.triu_indices(len(sizes), 1)
        apart = sizes[second] - sizes[first]
        telling = np.abs(apart) >= _SPREAD * sizes.max()
        if telling.any():
            slope = float(np.median((seconds[second] - seconds[first])[telling] / apart[telling]))
            fixed = float(np.median(seconds - slope * sizes))
            if slope >= 0 and fixed >= 0:
                return Line(fixed, slope)
            if slope < 0:
                return Line(float(np.median(seconds)), 0.0)
        return Line(0.0, float(np.median(seconds / sizes)))


class TierSpeed:
    """How fast one tier with ``readers`` threads hands out pages."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self.fetched = Samples(FETCHES_LAST_SECONDS)
        """Bytes that one thread fetched, and how long it took."""
        self.reluctance = Reluctance()
        """Fetches that were left out because computing is quicker."""

    def forget(self) -> None:
        """It was cut out: what was measured until then says nothing of what comes now."""
        self.fetched = Samples(FETCHES_LAST_SECONDS)

    def expected(self, size: int, waiting: int, batch: int, now: float) -> float:
        """Seconds until ``size`` bytes are there that stand behind ``waiting`` others; 0 while nothing is known.

        They are fetched ``batch`` bytes at a time, by several threads.
        """
        line = self.fetched.line(now)
        if line is None:
            return 0.0
        queued = (waiting + size) / self._readers
        return max(line.fixed * max(queued / batch, 1) + line.per_unit * queued, line.seconds(min(size, batch)))

    def worth(self, seconds: float, computing: float) -> bool:
        """Whether to fetch what takes ``seconds`` where computing it again takes ``computing`` (0: not known)."""
        return self.reluctance.allows(not computing or seconds <= computing)
