"""A trace through the brain of a node: every request looks up its blocks, computes what is missing and stores it.

One block is one page; there are no bytes behind it.  What runs is :class:`~ems.pool.core.pool_core.PoolCore` as it runs
in a node, at its own pace: virtual time comes from the trace.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ems.bench.trace.traffic import TraceRequest
from ems.config import PolicyName
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT
from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, carve

PAGE_BYTES = 64
"""Bytes of a page that is never written."""
OWNER = 1
"""The engine of a replay."""
BATCH = 8
"""Pages evicted at a time at most; a node takes more at a time, which costs some hits in a small pool."""


class Replayed(msgspec.Struct, frozen=True):
    """Blocks that were asked for, and how many of them were found with their whole prefix."""

    blocks: int
    hits: int

    @property
    def share(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def pool_of(capacity: int, policy: PolicyName) -> tuple[PoolCore, int]:
    """A brain with slots for exactly ``capacity`` pages of one namespace, and the number of that."""
    size = HEADERS_OFFSET + capacity * (PAGE_BYTES + HEADER_BYTES)
    while carve(size, PAGE_BYTES).slot_count < capacity:
        size += 4096
    geometry = carve(size, PAGE_BYTES)
    core = PoolCore([size], high_watermark=1.0, eviction_ratio=min(BATCH / capacity, 1.0), policy=policy)
    core.slots.touch(0, geometry.slot_offset(capacity))
    core.slots.touching_ended()
    return core, core.open_namespace("trace", PAGE_BYTES)


def serve(core: PoolCore, namespace: int, keys: list[bytes]) -> int:
    """One request: load what is there, store the rest; returns how many leading blocks were there."""
    found = core.reading.lookup(OWNER, namespace, keys, lease=True)
    core.settle()
    count = len(found.pages)
    if count < len(keys):
        reserved = core.writing.reserve(OWNER, namespace, keys[count - 1] if count else bytes(NO_PARENT), keys[count:])
        if reserved.granted:
            core.writing.commit(OWNER, reserved.reservation)
    if found.lease:
        core.reading.release(OWNER, found.lease)
    return count


class Queue:
    """The requests that wait behind the one that is served: each is announced when it joins, until it is served."""

    def __init__(self, core: PoolCore, namespace: int, requests: Sequence[TraceRequest], length: int) -> None:
        self._core = core
        self._namespace = namespace
        self._upcoming = iter(requests)
        self._waiting: deque[int] = deque()
        self._length = length

    def advance(self, now: float) -> TraceRequest | None:
        """One request leaves the queue, and one joins, if any is left; returns that one."""
        joined = None
        if self._waiting:
            self._core.announcements.withdraw(OWNER, self._waiting.popleft())
        while len(self._waiting) < self._length:
            joined = next(self._upcoming, None)
            if joined is None:
                break
            self._waiting.append(self._core.announce(OWNER, self._namespace, joined.keys, now))
        return joined


def replay(
    requests: Sequence[TraceRequest],
    capacity: int,
    policy: PolicyName,
    *,
    look_ahead: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Replayed:
    """Send ``requests`` through a pool of ``capacity`` blocks.

    With ``look_ahead`` so many requests behind the one that is served are waiting, and announced.  ``progress`` is
    called now and then with the number of requests that were served.
    """
    core, namespace = pool_of(capacity, policy)
    waiting = Queue(core, namespace, requests[1:], look_ahead)
    hits = blocks = 0
    for number, request in enumerate(requests):
        core.tick(request.at)
        waiting.advance(request.at)
        hits += serve(core, namespace, request.keys)
        blocks += len(request.keys)
        if progress is not None and number % 256 == 0:
            progress(number)
    return Replayed(blocks, hits)


def optimal_hits(requests: Sequence[TraceRequest], capacity: int) -> int:
    """The most hits that any policy could have reached: Belady's optimum, which knows the future.

    The block whose next use is farthest leaves first, a block that was just computed among them (bypass).
    """
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
