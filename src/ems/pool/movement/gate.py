"""Whether a tier may be asked at all: cut out at the first failure, brought back by good probes.

A brain.  What always holds: after a failure or a hang nothing is asked of the tier but probes, one at a time, rarer the
longer it fails; only several good ones in a row bring it back.
"""

from __future__ import annotations

GOOD_PROBES = 3
"""Good probes in a row that bring a tier back."""
FIRST_PAUSE = 1.0
"""Seconds until the first probe, and between good ones."""
MOST_PAUSE = 60.0
"""Most seconds between two probes; the pause doubles with each that fails."""


class Gate:
    """One ``direction`` of one tier, open from the start; pauses in seconds."""

    def __init__(self, direction: str, pause: float = FIRST_PAUSE, most_pause: float = MOST_PAUSE) -> None:
        self.direction = direction
        self._first_pause = pause
        self._most_pause = most_pause
        self.open = True
        self.reason = ""
        """Why it was cut out; empty while it is open."""
        self.cuts = 0
        self.bad = 0
        """Probes that failed since it was cut out."""
        self._good = 0
        self._pause = pause
        self._next_probe = 0.0

    def failed(self, reason: str, now: float) -> bool:
        """It failed or hung; True when that cut it out just now."""
        self._good = 0
        if not self.open:
            return False
        self.open, self.reason = False, reason
        self.cuts += 1
        self.bad = 0
        self._probe_in(self._first_pause, now)
        return True

    def _probe_in(self, pause: float, now: float) -> None:
        self._pause, self._next_probe = pause, now + pause

    def probe_due(self, now: float) -> bool:
        return not self.open and now >= self._next_probe

    def probed(self, reason: str, now: float) -> bool:
        """A probe ended, badly when there is a ``reason``; True when it brought the tier back."""
        if self.open:
            return False
        self._good = 0 if reason else self._good + 1
        if reason:
            self.bad += 1
            self.reason = reason
            self._probe_in(min(self._pause * 2, self._most_pause), now)
        elif self._good < GOOD_PROBES:
            self._probe_in(self._first_pause, now)
        else:
            self.open, self.reason = True, ""
        return self.open
