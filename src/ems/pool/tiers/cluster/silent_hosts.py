"""Which hosts of a cluster do not answer.

A brain.  What always holds: a host is doubted only where nothing came from it for longer than what is on its way takes
at the least rate, and counts as silent only for :data:`SILENT_SECONDS` after somebody found that it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ANSWER_SECONDS = 1.0
LEAST_RATE = 16 << 20
"""A host is asked for a few bytes where no transfer from it ended for so long, and as long as its bytes take at this
rate (in bytes a second), for all of them come at once.  It counts as silent where these bytes take so long, too: over
a slow link they come beside the others."""
SILENT_SECONDS = 10.0
"""How long it is left alone.  By then the master has noticed, too, where it is gone."""


class SilentHosts:
    """Hosts by their endpoints; those that are ``silent`` were found to be so ``now``.  Times are seconds."""

    def __init__(self, silent: Iterable[str], now: float) -> None:
        self._until: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._coming: Counter[str] = Counter()
        """Bytes that come from each host at this moment."""
        self.found_silent(silent, now)

    def found_silent(self, hosts: Iterable[str], now: float) -> None:
        self._until.update(dict.fromkeys(hosts, now + SILENT_SECONDS))

    def silent(self, now: float) -> list[str]:
        return [host for host in list(self._until) if self.is_silent(host, now)]

    def is_silent(self, host: str, now: float) -> bool:
        return now < self._until.get(host, now)

    def expect(self, host: str, size: int) -> None:
        """So many bytes more are on their way from a host; fewer where a transfer ended, or nobody waits for it."""
        self._coming[host] += size

    def heard(self, host: str, now: float) -> None:
        self._heard[host] = now

    def is_doubtful(self, host: str, since: float, now: float) -> bool:
        """Whether to ask a host for a few bytes, from which somebody waits for a transfer ``since`` then."""
        quiet = now - max(since, self._heard.get(host, since))
        return quiet >= ANSWER_SECONDS + self._coming[host] / LEAST_RATE and not self.is_silent(host, now)
