"""What an engine says of itself on ``/metrics`` and ``/v1/models``, for those of Kthena's plugins that go by it.

A latency is the mean of what was observed since the page before; while nothing new is observed it stays as it was.

What always holds: a page that makes no sense changes nothing, and what was said counts for :data:`FRESH` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ems.engines.pages import metrics_of, models_of
from ems.router.choosing.kthena import METRICS, Measured

FRESH: Final = 10.0
"""Seconds for which a page counts."""


class Figures:
    """What one engine said last; times are seconds on one monotonic clock."""

    __slots__ = ("_listed_at", "_models", "_said", "_said_at")

    def __init__(self) -> None:
        self._said: Mapping[str, float] = {}
        self._said_at = -math.inf
        self._models: frozenset[str] = frozenset()
        self._listed_at = -math.inf

    def take(self, path: bytes, page: bytes, now: float) -> None:
        """Take in the page that the engine has under a path.

        :raises ValueError: it makes no sense.
        """
        if path != METRICS:
            models = frozenset(models_of(page))
            if not models:
                raise ValueError("it lists no models")
            self._models, self._listed_at = models, now
            return
        new, old = metrics_of(page), self._current(now)
        for name in ("ttft", "tpot"):
            count, total = new.get(f"{name}_count", 0.0), new.get(f"{name}_sum", 0.0)
            if count < old.get(f"{name}_count", 0.0):
                old = {}  # the engine began anew
            more = count - old.get(f"{name}_count", 0.0)
            if more:
                new[name] = max(total - old.get(f"{name}_sum", 0.0), 0.0) / more
            elif name in old:
                new[name] = old[name]
        self._said, self._said_at = new, now

    def _current(self, now: float) -> Mapping[str, float]:
        return self._said if now - self._said_at <= FRESH else {}

    def measured(self, in_flight: int, matched: float, now: float) -> Measured:
        """Join what the engine says with what the router knows; all that runs counts as running where it is silent."""
        said = self._current(now)
        return Measured(
            in_flight,
            int(said.get("running", in_flight)),
            int(said.get("waiting", 0)),
            said.get("kv_usage"),
            said.get("ttft"),
            said.get("tpot"),
            matched,
            self._models if now - self._listed_at <= FRESH else frozenset(),
        )
