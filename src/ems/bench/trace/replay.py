"""A trace through the brain of a node: every request looks up its blocks, computes what is missing and stores it.

One block is one page; there are no bytes behind it.  What runs is :class:`~ems.pool.core.pool_core.PoolCore` as it runs
in a node, at its own pace: virtual time comes from the trace.

Above a tier it is measured how much of what any tier holds is in memory when its request is scheduled.  The tier
keeps every block that was ever stored and brings blocks up at a fixed rate, in the order in which they were asked for,
after a fixed latency.  Requests wait in a queue of a fixed length: when one joins it is announced, and what is missing
of its prefix in memory is brought up.  It is scheduled when as many have joined behind it as the queue is long.
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
TIER = 2
"""The owner that brings blocks up."""
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


class Tier(msgspec.Struct, frozen=True):
    """A tier below memory: blocks a second that it brings up, and seconds until the first of them is there."""

    rate: float
    latency: float = 0.02


class Residence(msgspec.Struct, frozen=True):
    """Blocks asked for; those of them that a tier held with their whole prefix; those of these that were in memory.

    ``brought`` were brought up from the tier below.
    """

    blocks: int
    held: int
    in_memory: int
    brought: int

    @property
    def share(self) -> float:
        return self.in_memory / self.held if self.held else 1.0


class _Lift:
    """Blocks on their way up, each with what comes before it and when it was asked for.

    As in a node, one that is in memory by the time of its turn, because its request was scheduled first, costs nothing.
    """

    def __init__(self, core: PoolCore, namespace: int, tier: Tier) -> None:
        self._core = core
        self._namespace = namespace
        self._tier = tier
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
                here = max(self._free_at, asked + self._tier.latency) + 1 / self._tier.rate
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


def residence(
    requests: Sequence[TraceRequest],
    capacity: int,
    policy: PolicyName,
    tier: Tier,
    *,
    look_ahead: int,
    progress: Callable[[int], None] | None = None,
) -> Residence:
    """Send ``requests`` through a queue of ``look_ahead`` into a pool of ``capacity`` blocks above ``tier``."""
    core, namespace = pool_of(capacity, policy)
    lift = _Lift(core, namespace, tier)
    below: set[bytes] = set()
    waiting: deque[tuple[int, TraceRequest]] = deque()
    blocks = held = in_memory = 0

    def leading(keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in below), len(keys))

    def schedule() -> None:
        nonlocal blocks, held, in_memory
        announcement, request = waiting.popleft()
        known = leading(request.keys)
        core.announcements.withdraw(OWNER, announcement)
        in_memory += serve(core, namespace, request.keys)
        held += known
        blocks += len(request.keys)
        below.update(request.keys)

    for number, request in enumerate(requests):
        core.tick(request.at)
        lift.arrive(request.at)
        announcement = core.announce(OWNER, namespace, request.keys, request.at)
        waiting.append((announcement, request))
        if look_ahead:
            present = len(core.reading.lookup(OWNER, namespace, request.keys, lease=False).pages)
            lift.ask(request.keys[: leading(request.keys)], present, request.at)
        if len(waiting) > look_ahead:
            schedule()
        if progress is not None and number % 256 == 0:
            progress(number)
    while waiting:
        schedule()
    return Residence(blocks, held, in_memory, lift.brought)


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
