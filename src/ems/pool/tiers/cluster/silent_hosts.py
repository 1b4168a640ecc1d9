"""Which hosts of a cluster do not answer.

A brain.  What always holds: a host is doubted only where nothing came from it for a while; from who is silent nothing
came since it was asked, and it is so for :data:`SILENT_SECONDS` at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

ANSWER_SECONDS = 1.0
LEAST_RATE = 16 << 20
"""A host is asked for a few bytes where no transfer from it ended for so long, and as long as its bytes take at this
rate (in bytes a second), for all of them come at once.  Over a slow link the few come beside the others."""
MOST_SECONDS = 1.9
"""The longest such wait: with that for the few bytes it ends before a node gives up its question for a list."""
SILENT_SECONDS = 10.0
"""How long a host is left alone.  By then the master has noticed, too, where it is gone."""


class SilentHosts:
    """Hosts by their endpoints; those that are silent are left alone ``until`` then.  Times are seconds."""

    def __init__(self, until: Mapping[str, float]) -> None:
        self._until = dict(until)
        self._heard: dict[str, float] = {}
        self._coming: Counter[str] = Counter()
        """Bytes that come from each host at this moment."""

    def found_silent(self, hosts: Iterable[str], asked: float, now: float) -> None:
        """They did not answer what they were ``asked`` then; who sent something else since is not silent."""
        silent = [host for host in hosts if self._heard.get(host, asked) <= asked]
        self._until.update(dict.fromkeys(silent, now + SILENT_SECONDS))

    def silent(self, now: float) -> dict[str, float]:
        """All hosts that are silent, and until when."""
        return {host: until for host, until in list(self._until.items()) if now < until}

    def is_silent(self, host: str, now: float) -> bool:
        return now < self._until.get(host, now)

    def expect(self, host: str, size: int) -> None:
        """So many bytes more are on their way from a host; fewer where a transfer ended, or nobody waits for it."""
        self._coming[host] += size

    def heard(self, host: str, now: float) -> None:
        """Something came from a host."""
        self._heard[host] = now
        self._until.pop(host, None)

    def is_doubtful(self, host: str, since: float, now: float) -> bool:
        """Whether to ask a host for a few bytes, from which somebody waits for a transfer ``since`` then."""
        patience = min(ANSWER_SECONDS + self._coming[host] / LEAST_RATE, MOST_SECONDS)
        return now - max(since, self._heard.get(host, since)) >= patience and not self.is_silent(host, now)
