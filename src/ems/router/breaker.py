"""The circuit breaker of one instance: may it be used, and when is it asked for its health again?

::

                 a failure                   THRESHOLD failures in a row, or a failed probe
      usable ───────────────▶ usable, doubted ──────────────────────────────▶ put aside
        ▲ ▲                       │                                              │ after the cooldown: one probe
        │ └── it works, or its ───┘                                              │
        │     probe passed                                                       │
        └──────────────────── the probe passed ──────────────────────────────────┤
                                                                                 └─ it failed: a longer cooldown

A doubted instance is used when there is no better one.  Without that, one that fails fast would always be the least
loaded and draw all requests to it.

What always holds: an instance that was put aside is not used before a probe passed, and that probe started after the
cooldown.  After a passed probe the first broken connection puts it aside again; only a request that worked restores
full trust.
"""

from __future__ import annotations

from typing import Final

THRESHOLD: Final = 3
"""Failures in a row that put an instance aside."""

COOLDOWN: Final = 1.0
"""Seconds before the first probe of an instance that failed; doubled each time it is put aside until it works again."""

COOLDOWN_CAP: Final = 5.0
"""Longest cooldown in seconds: an engine takes half a minute to start and should be noticed soon after."""


class Breaker:
    """What was seen of one instance.  A trusted one may be used before its first probe, another may not."""

    __slots__ = ("cooldown", "doubted", "failures", "probe_at", "probing", "proven", "usable")

    def __init__(self, now: float, *, trusted: bool) -> None:
        self.usable = trusted
        self.proven = False
        """Whether a request or a probe has worked since the instance was last put aside."""
        self.doubted = False
        """Whether it failed since it last worked or was found healthy."""
        self.failures = 0
        """Broken connections in a row."""
        self.cooldown = COOLDOWN
        self.probing = False
        self.probe_at: float | None = now
        """When the next probe is due; None when none is wanted."""

    def succeeded(self) -> None:
        """Record a request that worked; one that began before the instance was put aside proves nothing."""
        if self.usable:
            self.doubted = False
            self.failures = 0
            self.cooldown = COOLDOWN
            self.proven = True

    def failed(self, now: float) -> bool:
        """Record a connection that could not be made or broke; return whether this puts the instance aside."""
        if not self.usable:
            return False
        self.failures += 1
        if self.failures < THRESHOLD:
            self.suspect(now)
            return False
        self._put_aside(now)
        return True

    def suspect(self, now: float) -> None:
        """Doubt the instance until it works or a probe passes; alone, a server error as an answer does no more."""
        if self.usable:
            self.doubted = True
            if self.probe_at is None:
                self.probe_at = now + COOLDOWN

    def due(self, now: float) -> bool:
        return not self.probing and self.probe_at is not None and self.probe_at <= now

    def probe_started(self) -> None:
        self.probing = True
        self.probe_at = None

    def probe_passed(self) -> bool:
        """Record a healthy answer; return whether the instance comes back by it."""
        self.probing = False
        if self.usable:
            self.proven = True
            self.doubted = False
            return False
        if self.probe_at is not None:  # put aside while this probe ran: its answer is older than the failures
            return False
        self.usable = True
        self.proven = True
        self.failures = THRESHOLD - 1
        return True

    def probe_failed(self, now: float) -> bool:
        """Record that the instance is not healthy; return whether that is new: it was usable, or never asked before."""
        self.probing = False
        new = self.usable or self.cooldown == COOLDOWN
        if self.usable or self.probe_at is None:
            self._put_aside(now)
        return new

    def _put_aside(self, now: float) -> None:
        self.usable = False
        self.proven = False
        self.doubted = False
        self.failures = 0
        self.probe_at = now + self.cooldown
        self.cooldown = min(self.cooldown * 2, COOLDOWN_CAP)
