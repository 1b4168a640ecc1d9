"""Which host a request goes to.

``random`` draws one for each request; ``least-loaded`` takes one with least to compute; ``prefix`` takes the one that
served the session last, unless it has :data:`PATIENCE` seconds more to compute than the least loaded one.
"""

from __future__ import annotations

import numpy as np

from ems.simulate.plan import Routing

PATIENCE = 10.0


class Router:
    """Hosts by number; ``weight`` is for how many requests each one stands that is simulated."""

    def __init__(self, hosts: int, routing: Routing, weight: float) -> None:
        self._routing = routing
        self._weight = weight
        self._done_at = np.zeros(hosts)
        """When a host has computed all that it was given; infinite while it is gone."""
        self._last: dict[int, int] = {}

    def choose(self, session: int, draw: float, now: float) -> int:
        """The host of a request of ``session``, for which ``draw`` from 0 to 1 was drawn."""
        if self._routing == "random":
            return self._one_of(np.isfinite(self._done_at), draw)
        if self._routing == "prefix":
            last = self._last.get(session)
            if last is not None and self._done_at[last] <= max(now, self._done_at.min()) + PATIENCE:
                return last
        host = self._one_of(self._done_at <= max(now, self._done_at.min()), draw)
        self._last[session] = host
        return host

    def computes(self, host: int, seconds: float, now: float) -> None:
        self._done_at[host] = max(self._done_at[host], now) + seconds * self._weight

    def gone(self, host: int) -> None:
        self._done_at[host] = np.inf

    def back(self, host: int, now: float) -> None:
        self._done_at[host] = now

    @staticmethod
    def _one_of(fit: np.ndarray, draw: float) -> int:
        hosts = np.flatnonzero(fit)
        return int(hosts[int(draw * len(hosts))])
