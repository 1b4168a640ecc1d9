"""The most that any policy could have reached: Belady's optimum, which knows the future.

The block whose next use is farthest leaves first, a block that was just computed among them (bypass).  What counts as a
hit is the same as in a replay: a block present while all blocks before it are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ems.bench.trace.files import TraceRequest


def optimal_hits(requests: Sequence[TraceRequest], capacity: int) -> int:
    uses = [key for request in requests for key in request.keys]
    never = len(uses)
    upcoming = [never] * len(uses)
    seen: dict[bytes, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        upcoming[at] = seen.get(uses[at], never)
        seen[uses[at]] = at
    present: dict[bytes, int] = {}
    farthest: list[tuple[int, bytes]] = []
    hits = at = 0
    for request in requests:
        whole = True
        for key in request.keys:
            whole = whole and key in present
            hits += whole
            present[key] = upcoming[at]
            heapq.heappush(farthest, (-upcoming[at], key))
            at += 1
        while len(present) > capacity:
            then, key = heapq.heappop(farthest)
            if present.get(key) == -then:
                del present[key]
    return hits
