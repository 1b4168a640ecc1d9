"""Time as histories have it: it goes by when they say so, for clocks, for timers and for those who wait.

What always holds: what has passed grows only; a clock may be set otherwise, which changes nothing of what has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

PORTIONS = (0.1, 0.2, 0.3, 0.5, 1.0, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Seconds that go by before timers are looked at: most of what happens after a pause happens soon after its begin."""


class Times:
    """What has passed since the history began, and what clocks show."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.ahead = 0.0
        """By how much the clock of nodes goes before what has passed."""
        self.date = 1.7e9
        """What the wall's clock showed at the beginning, as it was set last."""

    def now(self) -> float:
        """The clock by which nodes measure."""
        return self.passed + self.ahead

    def wall(self) -> float:
        """Seconds since 1970, as anybody may set them."""
        return self.date + self.passed


class Turns(asyncio.SelectorEventLoop):
    """A loop whose timers know ``times`` alone; it runs when it is told, and tells ``surprised`` what nobody caught."""

    def __init__(self, times: Times, surprised: Callable[[BaseException], None]) -> None:
        self._times = times
        super().__init__()
        self._surprised = surprised
        self.set_exception_handler(self._caught)

    def _caught(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._surprised(error)

    def time(self) -> float:
        """What has passed."""
        return self._times.passed

    def go_round(self, rounds: int = 2) -> None:
        """Do what is due; what that asks for is done in the next round."""
        for _ in range(rounds):
            self.call_soon(self.stop)
            self.run_forever()

    def let_pass(self, seconds: float) -> None:
        """Let time go by, and do what is due meanwhile."""
        portions, left = iter(PORTIONS), seconds
        while left > 0:
            portion = min(next(portions, left), left)
            left -= portion
            self._times.passed += portion
            self.go_round()
