"""What lately became readable or left, for clients that tell others (KV events).

A brain.  Nothing is recorded while nobody asks.  What always holds: who goes on asking from where the last answer
ended learns every change once and in order, or that some were lost; memory is bounded by :data:`CAPACITY`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice

from ems.pool.protocol.messages import FROM_NOW, ChangeRun

CAPACITY = 65536
"""Changes that are remembered; one page of a block is one."""
TOLD_AT_ONCE = 4096
"""Changes that one answer tells of at most; whoever goes on from where it ended is told the others."""
ASKED_SECONDS = 60.0
"""Recording ends when nobody asked for so long."""


class ChangeLog:
    """The last changes of one node."""

    def __init__(self) -> None:
        self._changes: deque[tuple[str, bool, bytes]] = deque(maxlen=CAPACITY)
        self._sequence = 0
        self._asked_at: float | None = None

    def recording(self) -> bool:
        return self._asked_at is not None

    def stored(self, namespace: str, keys: Iterable[bytes]) -> None:
        self._add(namespace, stored=True, keys=keys)

    def removed(self, namespace: str, key: bytes) -> None:
        self._add(namespace, stored=False, keys=(key,))

    def _add(self, namespace: str, *, stored: bool, keys: Iterable[bytes]) -> None:
        if self._asked_at is not None:
            for key in keys:
                self._changes.append((namespace, stored, key))
                self._sequence += 1

    def since(self, sequence: int, namespaces: Sequence[str], now: float) -> tuple[int, bool, list[ChangeRun]]:
        """What changed in ``namespaces`` after ``sequence``: where to go on, whether some was lost, the changes."""
        if self._asked_at is None:
            # What happened while nobody asked is not known: whoever was told a place before has missed it.
            self._sequence += 1
        self._asked_at = now
        count = self._sequence - sequence
        if sequence == FROM_NOW:
            return self._sequence, False, []
        if not 0 <= count <= len(self._changes):
            return self._sequence, True, []
        first = len(self._changes) - count
        recent = list(islice(self._changes, first, first + TOLD_AT_ONCE))
        positions = {name: position for position, name in enumerate(namespaces)}
        wanted = (change for change in recent if change[0] in positions)
        runs = [
            ChangeRun(positions[name], stored, b"".join(key for _, _, key in group))
            for (name, stored), group in groupby(wanted, lambda change: change[:2])
        ]
        return sequence + len(recent), False, runs

    def tick(self, now: float) -> None:
        if self._asked_at is not None and now - self._asked_at >= ASKED_SECONDS:
            self._asked_at = None
            self._changes.clear()
