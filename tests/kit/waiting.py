"""Waiting for something that another process does: look again and again, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.01


def until(condition: Callable[[], object], what: str = "it holds", seconds: float = 20.0) -> None:
    """Return as soon as ``condition`` holds.

    Raises:
        AssertionError: it did not within ``seconds``; ``what`` was waited for.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds:.1f} s in vain until {what}")
        time.sleep(POLL_SECONDS)  # bounded by the deadline of this loop
