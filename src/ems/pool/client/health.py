"""The health gate: whether the pool may be asked at all, decided in virtual time.

It degrades at once and recovers slowly: an engine without its cache is slower, an engine that waits for a
sick one stands still.  What always holds: after a failed check or operation the gate is degraded; it
recovers only with a good check, after enough good ones in a row, and never while it changed too often of late.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ems.errors import ConfigError


class HealthRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the gate opens and closes."""

    check_seconds: float = 10.0
    """Time between two checks."""
    good_checks: int = 3
    """Good checks in a row that end a degradation."""
    flap_changes: int = 3
    """With this many status changes in the last ``flap_seconds`` the gate stays degraded."""
    flap_seconds: float = 60.0
    """How far back status changes count."""

    def __post_init__(self) -> None:
        if self.check_seconds <= 0 or self.flap_seconds <= 0:
            raise ConfigError("check_seconds and flap_seconds must be positive numbers of seconds")
        if self.good_checks < 1 or self.flap_changes < 1:
            raise ConfigError("good_checks and flap_changes must be at least 1")


class HealthGate:
    """Healthy from the start, which is a successful connection at ``now``."""

    def __init__(self, rules: HealthRules, now: float) -> None:
        self._rules = rules
        self._good = 0
        self._changes: deque[float] = deque()
        self.healthy = True
        self.next_check = now + rules.check_seconds

    def passed(self, now: float) -> bool:
        """The node answered a check.  True if the pool is asked again from now on."""
        self.next_check = now + self._rules.check_seconds
        if self.healthy:
            return False
        self._good += 1
        while self._changes and self._changes[0] <= now - self._rules.flap_seconds:
            self._changes.popleft()
        if self._good < self._rules.good_checks or len(self._changes) >= self._rules.flap_changes:
            return False
        self._change(now, healthy=True)
        return True

    def failed(self, now: float, *, check: bool) -> bool:
        """A check failed, or an operation did and not by its caller's fault.  True if the pool was asked until now."""
        if check:
            self.next_check = now + self._rules.check_seconds
        self._good = 0
        if not self.healthy:
            return False
        self._change(now, healthy=False)
        return True

    def _change(self, now: float, *, healthy: bool) -> None:
        self.healthy = healthy
        self._good = 0
        self._changes.append(now)
