"""How long the lookup of one request waits: for blocks that its prefill writes, and for those that come up from tiers.

A brain.  Until the scheduler asks for a request, it stands in the engine's queue and waiting costs nothing, so its
lookup goes on until everything is there.  What always holds: the wait ends a bounded time after the scheduler asked;
from then on no request waits longer for promoted blocks than computing them takes, nor for a tier that turned out to be
slower than computing.
"""

from __future__ import annotations

FIRST_PAUSE = 0.002
"""Seconds between the first two looks."""
MOST_PAUSE = 0.05
"""Seconds between two looks at most, once the scheduler asked."""
GROWTH = 1.1
"""Each pause to the one before once the scheduler asked: what came meanwhile waits a tenth of the time that it took."""
QUEUED_PAUSE = 1.0
"""Seconds between two looks at most while the request stands in the queue; there each is twice the one before."""
GRACE_SECONDS = 0.5
"""How long a hand-off waits for blocks that are announced but not even being written yet."""
STEP_SECONDS = 0.002
"""How long a step that computes nothing waits for answers.  A lookup takes about 1 ms, and such a step longer."""
STEP_SHARE = 0.05
"""Of what computing a request takes, so much a step waits for its answer: a step that begins without it may keep
it waiting as long as that takes."""
MOST_STEP_SECONDS = 0.02
"""How long one step waits for all answers at most."""


class StepWaits:
    """How long the steps of one engine wait for answers to lookups.

    What always holds: one step waits :data:`MOST_STEP_SECONDS` at most; steps in which requests run wait no more than
    :data:`STEP_SHARE` of the time.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        """When this step began to wait."""
        self._again_at = 0.0
        """From when on a step in which requests run may begin to wait."""

    def patience(self, now: float, age: float, computing: float, *, idle: bool) -> float:
        """Seconds that the step, in which nothing else runs where it is ``idle``, goes on waiting for one answer.

        The request was asked for ``age`` seconds ago, and computing it takes ``computing`` seconds (0: not known).
        """
        if not idle and self._since is None and now < self._again_at:
            return 0.0
        waits = 0.0 if self._since is None else now - self._since
        longest = computing * STEP_SHARE - age
        if idle:
            longest = max(longest, STEP_SECONDS - waits)
        return max(min(longest, MOST_STEP_SECONDS - waits), 0.0)

    def waited(self, began: float, ended: float, *, idle: bool) -> None:
        """The step waited from ``began`` to ``ended``."""
        if self._since is None:
            self._since = began
        if not idle:
            self._again_at = max(self._again_at, began) + (ended - began) / STEP_SHARE

    def next_step(self) -> None:
        self._since = None


class Waiting:
    """The wait of one request that came at ``asked_at``; ``expected`` of its tokens were announced by a prefill."""

    def __init__(self, asked_at: float, expected: int) -> None:
        self.asked_at = asked_at
        self.expected = expected
        self._due: float | None = None
        self._pause = FIRST_PAUSE
        self._promoted_from: tuple[int, float] | None = None
        """Tokens that were there when something was seen to rise, and when that was."""
        self._computing: float | None = None
        """Seconds that computing takes what was still to come up when the scheduler had asked."""

    @property
    def due(self) -> bool:
        return self._due is not None

    def hurry(self, now: float) -> None:
        """The scheduler asks for the request: from now on waiting costs."""
        if self._due is None:
            self._due = now
            self._pause = FIRST_PAUSE

    def _waited(self, now: float) -> float:
        return 0.0 if self._due is None else now - self._due

    def for_prefill(self, tokens: int, pending: bool, limit: float, now: float) -> bool:
        """Whether to go on waiting for the prefill, which has stored ``tokens`` tokens and is writing more or not.

        It waits for blocks that nobody writes yet only until the request is known for :data:`GRACE_SECONDS`.
        """
        if tokens >= self.expected or self._waited(now) >= limit:
            return False
        return pending or now - self.asked_at < GRACE_SECONDS

    def for_tiers(self, tokens: int, promoting: int, token_seconds: float, limit: float, now: float) -> bool:
        """Whether to go on waiting for ``promoting`` tokens behind the ``tokens`` ones that are in memory.

        ``token_seconds`` is what computing a token takes (0: not known).
        """
        if promoting <= 0:
            return False
        if self._promoted_from is None:
            self._promoted_from = tokens, now
        if self._due is None:
            return limit > 0
        promoted, seconds = tokens - self._promoted_from[0], now - self._promoted_from[1]
        if token_seconds and promoted > 0 and seconds > token_seconds * promoted:
            return False
        if self._computing is None:
            self._computing = token_seconds * promoting
        return self._waited(now) < (min(limit, self._computing) if self._computing else limit)

    def pause(self) -> float:
        pause = self._pause
        self._pause = min(pause * 2, QUEUED_PAUSE) if self._due is None else min(pause * GROWTH, MOST_PAUSE)
        return pause
