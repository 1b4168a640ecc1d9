"""What computing and loading cost on this machine, learned from what was computed and loaded, and which is cheaper.

A brain: it gets measurements and the time.  What always holds: without enough fresh measurements of both it never
advises against a load; a few measurements that are far off do not change its mind; measurements grow old, and of any
``TRY_EVERY`` loads that look too dear in a row one is advised all the same, so a pool that was slow once is tried
again.
"""

from __future__ import annotations

from collections import deque

from ems.pool.movement.speed import Reluctance, Samples

LOADS_LAST_SECONDS = 60.0
"""How long the measurement of a load counts.  Those of computing are made all the time and do not grow old."""

PREFILL_TOKENS = 32
"""A request that computes at least so many tokens in a step computes its prompt."""

MOST_STEPS = 16
"""More steps than this are not under way: the engine has dropped some, and pairs are made anew."""


class CostModel:
    """Says whether a load is worth it.  ``step_tokens`` is the most that the engine computes in one step (0: any)."""

    def __init__(self, *, enabled: bool = True, step_tokens: int = 0) -> None:
        self._enabled = enabled
        self._step_tokens = step_tokens
        self.computed = Samples(None)
        """Tokens that were computed, and how long it took."""
        self.loaded = Samples(LOADS_LAST_SECONDS)
        """Tokens that were loaded, and how long it took, not counting the time in the queue."""
        self.reluctance = Reluctance()

    def learn(self, now: float) -> None:
        """Learn from new measurements.  This takes a moment, so no request should be waiting for it."""
        self.computed.line(now)
        self.loaded.line(now)

    def worth_loading(self, tokens: int, now: float) -> bool:
        return self.reluctance.allows(not self._enabled or self.saving(tokens, now) >= 0)

    def load_seconds(self, tokens: int, now: float) -> float | None:
        loaded = self.loaded.line(now, draw=False)
        return None if loaded is None else loaded.seconds(tokens)

    def saving(self, tokens: int, now: float) -> float:
        """Seconds that loading ``tokens`` tokens saves, negative where it costs some; 0 while nothing is known."""
        computed, loaded = self.computed.line(now, draw=False), self.loaded.line(now, draw=False)
        if computed is None or loaded is None:
            return 0.0
        # The step that computes the rest of the prompt is needed in any case: only further ones count whole.
        further = tokens // self._step_tokens if self._step_tokens else 0
        return computed.per_unit * tokens + computed.fixed * further - loaded.seconds(tokens)

    def speeds(self, now: float) -> tuple[float, float]:
        """Tokens that are computed, and that are loaded, in a second; 0 where that is not known yet."""
        lines = (samples.line(now, draw=False) for samples in (self.computed, self.loaded))
        computed, loaded = (1 / line.per_unit if line is not None and line.per_unit > 0 else 0.0 for line in lines)
        return computed, loaded


class StepTimes:
    """How long the engine's steps take, as its scheduler sees them.

    Steps end in the order in which they began, also where the engine begins the next before the last has ended.  The
    time that a step waited for the one before it is not its own.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, float]] = deque()
        self._last_end = 0.0

    def began(self, tokens: int, most_of_one: int, now: float) -> None:
        """A step of ``tokens`` tokens begins; no request computes more than ``most_of_one`` of them."""
        if len(self._begun) >= MOST_STEPS:
            self._begun.clear()
        self._begun.append((tokens if most_of_one >= PREFILL_TOKENS else 0, now))

    def ended(self, now: float) -> tuple[int, float] | None:
        """The oldest step under way ended: its tokens and seconds if it computed prompts."""
        if not self._begun:
            return None
        tokens, begun = self._begun.popleft()
        seconds = now - max(begun, self._last_end)
        self._last_end = now
        return (tokens, seconds) if tokens else None
