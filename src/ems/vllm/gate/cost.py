"""What computing and loading cost on this machine, learned from what was computed and loaded, and which is cheaper.

A brain: it gets measurements and the time.  What always holds: without enough fresh measurements of both it never
advises against a load; a few measurements that are far off do not change its mind; measurements grow old, and of any
``TRY_EVERY`` loads that look too dear in a row one is advised all the same, so a pool that was slow once is tried
again.
"""

from __future__ import annotations

import msgspec

from ems.pool.movement.speed import Line, Reluctance, Samples

LOADS_LAST_SECONDS = 60.0
"""How long the measurement of a load counts.  Those of computing are made all the time and do not grow old."""


class CostFigures(msgspec.Struct, frozen=True):
    """What a model has learned; 0 where it knows nothing yet."""

    compute_tokens_per_second: float
    load_tokens_per_second: float
    refused: int
    """Loads that were advised against."""


class CostModel:
    """Says whether a load is worth it.  ``step_tokens`` is the most that the engine computes in one step (0: any)."""

    def __init__(self, *, enabled: bool = True, step_tokens: int = 0) -> None:
        self._enabled = enabled
        self._step_tokens = step_tokens
        self._computed = Samples(None)
        self._loaded = Samples(LOADS_LAST_SECONDS)
        self._reluctance = Reluctance()

    def computed(self, tokens: int, seconds: float, now: float) -> None:
        self._computed.add(tokens, seconds, now)

    def loaded(self, tokens: int, seconds: float, now: float) -> None:
        """A load of ``tokens`` tokens took ``seconds``, not counting the time in the queue."""
        self._loaded.add(tokens, seconds, now)

    def learn(self, now: float) -> None:
        """Learn from new measurements.  This takes a moment, so no request should be waiting for it."""
        self._computed.line(now)
        self._loaded.line(now)

    def _lines(self, now: float) -> tuple[Line | None, Line | None]:
        return self._computed.line(now, draw=False), self._loaded.line(now, draw=False)

    def worth_loading(self, tokens: int, now: float) -> bool:
        return self._reluctance.allows(not self._enabled or self.saving(tokens, now) >= 0)

    def load_seconds(self, tokens: int, now: float) -> float | None:
        loaded = self._loaded.line(now, draw=False)
        return None if loaded is None else loaded.seconds(tokens)

    def saving(self, tokens: int, now: float) -> float:
        """Seconds that loading ``tokens`` tokens saves, negative where it costs some; 0 while nothing is known."""
        computed, loaded = self._lines(now)
        if computed is None or loaded is None:
            return 0.0
        # The step that computes the rest of the prompt is needed in any case: only further ones count whole.
        further = tokens // self._step_tokens if self._step_tokens else 0
        return computed.per_unit * tokens + computed.fixed * further - loaded.seconds(tokens)

    def figures(self, now: float) -> CostFigures:
        computed, loaded = self._lines(now)
        return CostFigures(
            1 / computed.per_unit if computed is not None and computed.per_unit > 0 else 0.0,
            1 / loaded.per_unit if loaded is not None and loaded.per_unit > 0 else 0.0,
            self._reluctance.refused,
        )
