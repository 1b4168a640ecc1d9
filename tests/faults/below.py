"""The tiers below a node that is hurt: real ones, on places that fail, with threads that work when they are told.

What always holds: the places outlive the nodes; each process that is the node has threads of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.settings import TierConfig
from ems.pool.tiers.threads import Clock, Tell
from tests.faults.faulty_store import FaultyStore
from tests.faults.points import Points
from tests.faults.step_executor import StepExecutor
from tests.faults.times import Times
from tests.kit.tiers import KEYS

TIMEOUT = 10.0
CONFIGS = (
    TierConfig(kind="dir", place="near", size=96 << 10, queue=4 << 10, batch=2 << 10, readers=2, timeout=TIMEOUT),
    TierConfig(
        kind="s3",
        place="far/away",
        write="on_evict",
        ttl=3600.0,
        queue=8 << 10,
        batch=4 << 10,
        readers=2,
        timeout=TIMEOUT,
        compress="zstd",
    ),
)
"""The tiers of a history, the first of them or both."""
ROOM = 64 << 10
"""Bytes that the first place has."""
CREWS = 3
"""Crews of one tier: readers, writers, and whoever keeps order."""


class Workers:
    """The threads of one process."""

    def __init__(self, below: Below) -> None:
        self._below = below
        self.executors: list[StepExecutor] = []

    def crew(self, _name: str, count: int, tell: Tell, clock: Clock) -> StepExecutor:
        """A crew, as a tier of a node has it made."""
        place = self._below.places[len(self.executors) // CREWS]
        executors = StepExecutor(count, tell, clock, self._below.times, place.seconds)
        self.executors.append(executors)
        return executors

    def can_do(self) -> list[Callable[[], None]]:
        """All that can begin or end now."""
        able: list[Callable[[], None]] = []
        for executors in self.executors:
            if executors.can_begin():
                able.append(executors.begin)
            able += [partial(executors.end, one) for one in executors.can_end()]
        return able

    def begin(self) -> None:
        """Whichever thread has nothing to do begins what waits."""
        for executors in self.executors:
            while executors.can_begin():
                executors.begin()

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being done."""
        return any(executors.waiting or executors.running for executors in self.executors)

    def mend(self) -> None:
        """What hung does so no longer."""
        for executors in self.executors:
            executors.mend()

    def kill(self) -> None:
        """The process was killed."""
        for executors in self.executors:
            executors.kill()

    def counts(self) -> Counter[str]:
        """What they did."""
        return sum((executors.counts for executors in self.executors), Counter())


class Below:
    """The places of ``count`` tiers."""

    def __init__(self, count: int, times: Times, points: Points) -> None:
        self.times = times
        self.configs = CONFIGS[:count]
        self.places = [
            FaultyStore(times, points, config.kind, ROOM if number == 0 else None)
            for number, config in enumerate(self.configs)
        ]

    def open(self) -> list[tuple[TierConfig, PackTier]]:
        """The tiers, for a process that begins."""
        return [(config, self.tier(number)) for number, config in enumerate(self.configs)]

    def tier(self, number: int) -> PackTier:
        """One tier, as any node opens it."""
        config = self.configs[number]
        compressor = Compressor(config.element) if config.compress == "zstd" else None
        return PackTier(
            config.name,
            self.places[number],
            KEYS,
            limit=config.size,
            ttl=config.ttl,
            compressor=compressor,
            clock=self.times.wall,
        )

    def mend(self) -> None:
        """Nothing is wrong with any place."""
        for place in self.places:
            place.wrong.clear()
