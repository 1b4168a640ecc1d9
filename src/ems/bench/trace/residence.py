"""How much of what any tier holds is in memory when its request is scheduled.

A tier below memory keeps every block that was ever stored and brings blocks up at a fixed rate, in the order in which
they were asked for, after a fixed latency.  Requests wait in a queue of a fixed length: when one joins it is announced,
and what is missing of its prefix in memory is brought up.  It is scheduled when as many have joined behind it as the
queue is long.  Time is that of the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ems.bench.trace.replay import OWNER, pool_of, serve
from ems.bench.trace.traffic import TraceRequest
from ems.config import PolicyName
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT

TIER = 2
"""The owner that brings blocks up."""


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
