"""What computing and loading cost on this machine, learned from what was computed and loaded, and which is cheaper.

A brain: it gets measurements and the time.  What always holds: without enough fresh measurements of both it never
advises against a load; a few measurements that are far off do not change its mind; measurements grow old, and of any
:data:`TRY_EVERY` loads that look too dear in a row one is advised all the same, so a pool that was slow once is tried
again.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

LEAST_SAMPLES = 5
"""Measurements without which nothing is known."""
SAMPLES = 32
"""Measurements that are kept, of each kind."""
LOADS_LAST_SECONDS = 60.0
"""How long the measurement of a load counts.  Those of computing are made all the time and do not grow old."""
TRY_EVERY = 16
"""Of so many loads in a row that look too dear the last is tried."""
FIT_SECONDS = 0.25
"""A new line is drawn at most this often; it takes about 100 us of a thread that must not be held up."""
_SPREAD = 0.1
"""Two sizes tell a slope only if they differ by this share of the largest."""


class CostFigures(msgspec.Struct, frozen=True):
    """What a model has learned; 0 where it knows nothing yet."""

    compute_tokens_per_second: float
    load_tokens_per_second: float
    load_fixed_seconds: float
    refused: int
    """Loads that were advised against."""


class Line(msgspec.Struct, frozen=True):
    """Seconds that work of some size takes: a fixed part and a part a token."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        """How long work on ``tokens`` tokens takes in one go."""
        return self.fixed + self.per_token * tokens


class Samples:
    """The latest measurements of one kind of work, and the line through them.

    The slope is the median of the slopes between any two (Theil and Sen), so that up to a quarter of the measurements
    may be anything.
    """

    def __init__(self, lasts: float | None) -> None:
        self._lasts = lasts
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES)
        self._line: Line | None = None
        self._known = True
        self._next_fit = 0.0

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """Work on ``tokens`` tokens took ``seconds``; nonsense is left out."""
        if tokens > 0 and seconds > 0:
            self._samples.append((tokens, seconds, now))
            self._known = False

    def line(self, now: float) -> Line | None:
        """The line, None without enough fresh measurements."""
        while self._lasts is not None and self._samples and self._samples[0][2] < now - self._lasts:
            self._samples.popleft()
            self._known = False
        if len(self._samples) < LEAST_SAMPLES:
            self._line = None
        elif not self._known and (self._line is None or now >= self._next_fit):
            self._known = True
            self._next_fit = now + FIT_SECONDS
            self._line = self._fit()
        return self._line

    def _fit(self) -> Line:
        tokens, seconds, _ = np.array(self._samples, dtype=np.float64).T
        first, second = np.triu_indices(len(tokens), 1)
        apart = tokens[second] - tokens[first]
        telling = np.abs(apart) >= _SPREAD * tokens.max()
        if telling.any():
            slope = float(np.median((seconds[second] - seconds[first])[telling] / apart[telling]))
            fixed = float(np.median(seconds - slope * tokens))
            if slope >= 0 and fixed >= 0:
                return Line(fixed, slope)
            if slope < 0:
                return Line(float(np.median(seconds)), 0.0)
        return Line(0.0, float(np.median(seconds / tokens)))


class CostModel:
    """Says whether a load is worth it.  ``step_tokens`` is the most that the engine computes in one step (0: any)."""

    def __init__(self, *, enabled: bool = True, step_tokens: int = 0) -> None:
        self._enabled = enabled
        self._step_tokens = step_tokens
        self._computed = Samples(None)
        self._loaded = Samples(LOADS_LAST_SECONDS)
        self._dear_in_a_row = 0
        self._refused = 0

    def computed(self, tokens: int, seconds: float, now: float) -> None:
        """A step computed ``tokens`` tokens, most of them of prompts, in ``seconds``."""
        self._computed.add(tokens, seconds, now)

    def loaded(self, tokens: int, seconds: float, now: float) -> None:
        """The state of ``tokens`` tokens was loaded in ``seconds``, without the time that the load had to wait."""
        self._loaded.add(tokens, seconds, now)

    def worth_loading(self, tokens: int, now: float) -> bool:
        """Whether the state of ``tokens`` tokens should be loaded rather than computed."""
        if not self._enabled or self.saving(tokens, now) >= 0:
            self._dear_in_a_row = 0
            return True
        self._dear_in_a_row += 1
        if self._dear_in_a_row >= TRY_EVERY:
            self._dear_in_a_row = 0
            return True
        self._refused += 1
        return False

    def saving(self, tokens: int, now: float) -> float:
        """Seconds that loading ``tokens`` tokens saves, negative where it costs some; 0 while nothing is known."""
        computed, loaded = self._computed.line(now), self._loaded.line(now)
        if computed is None or loaded is None:
            return 0.0
        # The step that computes the rest of the prompt is needed in any case: only further ones count whole.
        further = tokens // self._step_tokens if self._step_tokens else 0
        return computed.per_token * tokens + computed.fixed * further - loaded.seconds(tokens)

    def figures(self, now: float) -> CostFigures:
        """What is known now."""
        computed, loaded = self._computed.line(now), self._loaded.line(now)
        return CostFigures(
            1 / computed.per_token if computed is not None and computed.per_token > 0 else 0.0,
            1 / loaded.per_token if loaded is not None and loaded.per_token > 0 else 0.0,
            loaded.fixed if loaded is not None else 0.0,
            self._refused,
        )
