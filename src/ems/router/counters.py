"""What the router has done so far: plain numbers, read by the metrics page and by tests."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ems.histogram import Histogram

if TYPE_CHECKING:
    from ems.router.fleet import Role

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets, in seconds."""


class Prefill(StrEnum):
    """How the prefill of one request ended."""

    DONE = "done"
    REFUSED = "refused"
    """The client's fault; the prefill's answer went to the client."""
    SKIPPED = "skipped"
    """No prefill instance could do it: decode computed the prompt itself."""
    TIMED_OUT = "timed_out"
    """Not done in time: decode computed the prompt itself."""


class Counters:
    """One set a router."""

    def __init__(self) -> None:
        self.running = 0
        """Completion requests that are being served."""
        self.answered: Counter[tuple[str, int]] = Counter()
        """Requests by endpoint and status; 499 stands for a client that left before it had an answer."""
        self.prefills: Counter[Prefill] = Counter()
        self.retries: Counter[Role] = Counter()
        self.disconnects = 0
        """Clients that left before the end."""
        self.breaks = 0
        """Answers that ended early after the first byte."""
        self.first_byte = Histogram(SECONDS)
        """Seconds from a request's arrival to the first byte of its answer."""
        self.prefill_time = Histogram(SECONDS)
        """Seconds of the prefills that were done."""
