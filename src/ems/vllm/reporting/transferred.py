"""What a worker's loads and saves were like: kept until the engine asks, and told to the scheduler side.

Memory is bounded: where nobody asks, the oldest are forgotten.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

KEPT = 1024
"""Transfers that are kept for who asks late."""


class Transferred(msgspec.Struct, frozen=True, array_like=True):
    """One load or save of one worker that ended, in blocks of the request.

    Of all workers that move parts of the same blocks a ``leading`` one stands for them; bytes are the worker's own.
    ``failed`` blocks of a load hold nothing.
    """

    load: bool
    leading: bool
    blocks: int
    failed: int
    bytes: int
    seconds: float


class TransferLog:
    """Transfers of one worker, for two readers: the engine's statistics and the scheduler side."""

    def __init__(self) -> None:
        self._for_stats: deque[Transferred] = deque(maxlen=KEPT)
        self._for_report: deque[Transferred] = deque(maxlen=KEPT)
        self._errors: Counter[str] = Counter()

    def add(self, transferred: Transferred) -> None:
        self._for_stats.append(transferred)
        self._for_report.append(transferred)

    def failed(self, error: str) -> None:
        self._errors[error] += 1

    def take_for_stats(self) -> list[Transferred]:
        taken = list(self._for_stats)
        self._for_stats.clear()
        return taken

    def take_for_report(self) -> tuple[list[Transferred], dict[str, int]]:
        taken, errors = list(self._for_report), dict(self._errors)
        self._for_report.clear()
        self._errors.clear()
        return taken, errors
