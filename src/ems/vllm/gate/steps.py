"""How long the engine's steps take, as its scheduler sees them.

A brain.  Steps end in the order in which they began, also where the engine begins the next before the last has
ended; the time that a step waited for the one before it is not its own.
"""

from __future__ import annotations

from collections import deque

PREFILL_TOKENS = 32
"""A request that computes at least so many tokens in a step computes its prompt."""
_MOST_AT_ONCE = 16
"""More steps than this are not under way: the engine has dropped some, and pairs are made anew."""


class StepTimes:
    """Pairs the beginnings and ends of steps."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, float]] = deque()
        self._last_end = 0.0

    def began(self, tokens: int, most_of_one: int, now: float) -> None:
        """A step of ``tokens`` tokens begins; no request computes more than ``most_of_one`` of them."""
        if len(self._begun) >= _MOST_AT_ONCE:
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
