"""Constants of the simulated network, and how long a transfer takes on links that others use, too.

What always holds: a figure does not depend on which share of the traffic is simulated.  That is why a link is not a
queue: whoever transfers gets his share of it (processor sharing), and how busy it is, is an average over some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import exp, inf

from ems.errors import ConfigError

AVERAGED_SECONDS = 10.0
BUSIEST = 0.99
"""A link or master that is busier serves as if it were this busy; that it is overloaded is in the report."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What transfers, calls and computing cost: assumptions (a link of 100 Gbit/s, eight GPUs a host) until set."""

    latency: float = 0.0002
    """Seconds until a transfer between hosts begins."""
    bandwidth: float = 12.5e9
    """Bytes a second of a host's link, in each direction."""
    copy_bandwidth: float = 8e9
    """Bytes a second at which a host copies from its own part of the cluster."""
    rpc_latency: float = 0.0005
    """Seconds that a call of the idle master takes, as its caller sees it."""
    rpc_cost: float = 0.00002
    """Seconds that one call keeps the master busy, beside its keys."""
    key_cost: float = 0.000001
    """Seconds that each key of a call keeps the master busy."""
    timeout: float = 1.0
    """Seconds that a fetch from a host that is gone takes until it is given up."""
    persistent_latency: float = 0.02
    """Seconds until the persistent tier begins to answer."""
    persistent_bandwidth: float = 1e9
    """Bytes a second that a host gets from the persistent tier."""
    compute: float = 0.01
    """Seconds in which a host computes one block."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < inf or (not value and "bandwidth" in field.name):
                name = field.name.replace("_", "-")
                raise ConfigError(f"--{name} is {value}, expected a finite number, 0 or more (a bandwidth: above 0)")


class Load:
    """How busy something is that many share; ``weight`` is for how many each one stands that is simulated.

    The average is over as many transfers whatever the weight, so over a longer time in a sample.
    """

    __slots__ = ("_at", "_over", "_weight", "_work")

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._over = AVERAGED_SECONDS * weight
        self._work = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._work = self._left(now) + seconds * self._weight
        self._at = now

    def busy(self, now: float) -> float:
        return self._left(now) / self._over

    def stretch(self, now: float) -> float:
        """How many times as long something takes as if nobody else were there."""
        return 1 / (1 - min(self.busy(now), BUSIEST))

    def _left(self, now: float) -> float:
        return self._work * exp((self._at - now) / self._over)
