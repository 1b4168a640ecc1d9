"""A trace through the brain of a node: every request looks up its blocks, computes what is missing and stores it.

One block is one page; there are no bytes behind it.  What runs is :class:`~ems.pool.core.pool_core.PoolCore` as it runs
in a node, at its own pace: virtual time comes from the trace.

Requests wait in a queue of a fixed length: when one joins it is announced.  It is scheduled when as many have joined
behind it as the queue is long.  Above a tier it is measured how much of what any tier holds is in memory then.  The
tier keeps every block that was ever stored, and brings up what is missing of an announced prefix in memory: at a fixed
rate, in the order in which it was asked for, after a fixed latency.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ems.bench.trace.traffic import TraceRequest
from ems.config import PolicyName
from ems.pool.core.changes import ChangeLog
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT
from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, carve
from ems.pool.reasons.eviction_log import CAPACITY as NOTES

PAGE_BYTES = 64
"""Bytes of a page that is never written."""
OWNER = 1
"""The engine of a replay."""
TIER = 2
"""The owner that brings blocks up."""
TIER_LATENCY = 0.02
"""Seconds until the first block is there for which a tier was asked."""
BATCH = 8
"""Pages evicted at a time at most; a node takes more at a time, which costs some hits in a small pool."""


class Replayed(msgspec.Struct, frozen=True):
    """Blocks that were asked for; those found in memory with their whole prefix; those that any tier held that way.

    ``brought`` were brought up from the tier below.
    """

    blocks: int
    hits: int
    held: int
    brought: int

    @property
    def share(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def in_memory(self) -> float:
        """What was in memory when it was scheduled, as a share of what any tier held."""
        return self.hits / self.held if self.held else 1.0


def pool_of(
    capacity: int, policy: PolicyName, changes: ChangeLog | None = None, notes: int = NOTES
) -> tuple[PoolCore, int]:
    """A brain with slots for exactly ``capacity`` pages of one namespace, and the number of that."""
    size = HEADERS_OFFSET + capacity * (PAGE_BYTES + HEADER_BYTES)
    while carve(size, PAGE_BYTES).slot_count < capacity:
        size += 4096
    geometry = carve(size, PAGE_BYTES)
    ratio = min(BATCH / capacity, 1.0)
    core = PoolCore([size], high_watermark=1.0, eviction_ratio=ratio, policy=policy, changes=changes, notes=notes)
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


class _Lift:
    """Blocks on their way up, each with what comes before it and when it was asked for.

    As in a node, one that is in memory by the time of its turn, because its request was scheduled first, costs nothing.
    """

    def __init__(self, core: PoolCore, namespace: int, rate: float) -> None:
        self._core = core
        self._namespace = namespace
        self._rate = rate
        self._coming: deque[tuple[float, bytes, bytes]] = deque()
        self._on_the_way: set[bytes] = set()
        self._free_at = 0.0
        self.brought = 0

    def ask(self, keys: Sequence[bytes], present: int, now: float) -> None:
        """Bring up ``keys`` but for the ``present`` first, which are in memory."""
        for at in range(present, len(keys)):
            if keys[at] not in self._on_the_way:
                self._coming.append((now, keys[at - 1] if at else bytes(NO_PARENT), keys[at]))
                self._on_the_way.add(keys[at])

    def arrive(self, now: float) -> None:
        while self._coming:
            asked, parent, key = self._coming[0]
            if self._core.page(self._namespace, key) is None:
                here = max(self._free_at, asked + TIER_LATENCY) + 1 / self._rate
                if here > now:
                    return
                self._free_at = here
                self._store(parent, key)
            self._coming.popleft()
            self._on_the_way.remove(key)

    def _store(self, parent: bytes, key: bytes) -> None:
        reserved = self._core.writing.reserve(TIER, self._namespace, parent, [key])
        if reserved.granted:
            self._core.writing.commit(TIER, reserved.reservation)
            self.brought += 1


def replay(
    requests: Sequence[TraceRequest],
    capacity: int,
    policy: PolicyName,
    *,
    look_ahead: int = 0,
    tier_rate: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Replayed:
    """Send ``requests`` through a queue of ``look_ahead`` into a pool of ``capacity`` blocks.

    With a ``tier_rate`` it is above a tier that brings up so many blocks a second.  ``progress`` is called now and
    then with the number of requests that joined the queue.
    """
    core, namespace = pool_of(capacity, policy)
    lift = _Lift(core, namespace, tier_rate) if tier_rate else None
    stored: set[bytes] = set()
    waiting: deque[tuple[int, TraceRequest]] = deque()
    blocks = hits = held = 0

    def leading(keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in stored), len(keys))

    def schedule() -> None:
        nonlocal blocks, hits, held
        announcement, request = waiting.popleft()
        core.announcements.withdraw(OWNER, announcement)
        hits += serve(core, namespace, request.keys)
        held += leading(request.keys)
        blocks += len(request.keys)
        stored.update(request.keys)

    for number, request in enumerate(requests):
        core.tick(request.at)
        if lift is not None:
            lift.arrive(request.at)
        waiting.append((core.announce(OWNER, namespace, request.keys, request.at), request))
        if lift is not None and look_ahead:
            present = len(core.reading.lookup(OWNER, namespace, request.keys, lease=False).pages)
            lift.ask(request.keys[: leading(request.keys)], present, request.at)
        if len(waiting) > look_ahead:
            schedule()
        if progress is not None and number % 256 == 0:
            progress(number)
    while waiting:
        schedule()
    return Replayed(blocks, hits, held, 0 if lift is None else lift.brought)


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
