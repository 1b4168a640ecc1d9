"""Which requests come when: a trace, as many times as wished, all of it or a sample of its sessions.

What always holds: a request is simulated with all others of its session, so prefixes stay whole; a smaller sample of
the same seed is part of a larger one; the first copy is the trace itself; nothing but the trace and the seed decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ems.bench.trace.traffic import TraceRequest

COMMON, FEW = 0.01, 16
"""A block that a larger share of all requests has, and more than a few, is of a system prompt and names no session."""
GROUPS = 16
"""Parts into which sessions are dealt, to see by how much they differ."""


def sessions_of(requests: Sequence[TraceRequest]) -> list[int]:
    """The session of each request: equal numbers for prompts with the same first block that is not common."""
    counts = Counter(key for request in requests for key in set(request.keys))
    most = max(COMMON * len(requests), FEW)
    numbers: dict[bytes, int] = {}
    return [
        numbers.setdefault(next((key for key in one.keys if counts[key] <= most), one.keys[-1]), len(numbers))
        for one in requests
    ]


class Workload:
    """Requests in the order of their time, as arrays: those of a thousand copies of a trace do not fit as objects."""

    def __init__(self, requests: Sequence[TraceRequest], copies: int, sample: float, spread: float, seed: int) -> None:
        self._keys = [request.keys for request in requests]
        self._ends = [[key[4:] for key in request.keys] for request in requests] if copies > 1 else []
        self.longest = max(map(len, self._keys))
        self.distinct = len({key for keys in self._keys for key in keys})
        session = np.array(sessions_of(requests), dtype=np.int32)
        self.sessions = int(session.max()) + 1
        at = np.array([request.at for request in requests])
        parts = [self._copy(copy, session, at, sample, spread, seed) for copy in range(copies)]
        times = np.concatenate([part[0] for part in parts])
        order = np.argsort(times, kind="stable")
        self.at = times[order]
        self.lasts = float(self.at[-1]) if len(self.at) else 0.0
        """Seconds until the last request."""
        self.copy, self.number, self.session, self.group = (
            np.concatenate([part[field] for part in parts])[order] for field in range(1, 5)
        )
        self.draw = np.random.default_rng([seed, 1]).random(len(times))
        """A number from 0 to 1 for each request, for whoever chooses its host."""

    def _copy(
        self, copy: int, session: np.ndarray, at: np.ndarray, sample: float, spread: float, seed: int
    ) -> tuple[np.ndarray, ...]:
        draw = np.random.default_rng([seed, 0, copy])
        shift = draw.random() * spread if copy else 0.0
        chosen = draw.random(self.sessions)
        group = draw.integers(GROUPS, size=self.sessions, dtype=np.int8)
        numbers = np.flatnonzero(chosen[session] < sample).astype(np.int32)
        mine = session[numbers]
        copies = np.full(len(numbers), copy, dtype=np.int32)
        return at[numbers] + shift, copies, numbers, mine + np.int64(copy) * self.sessions, group[mine]

    def __len__(self) -> int:
        return len(self.at)

    def keys(self, copy: int, number: int) -> list[bytes]:
        if not copy:
            return self._keys[number]
        begin = b"\xff" + copy.to_bytes(3, "little")
        return [begin + end for end in self._ends[number]]
