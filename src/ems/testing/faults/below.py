"""The tiers below a node that is hurt: real ones, on places that fail, with threads that work when they are told.

What always holds: the places outlive the nodes; each process that is the node has threads of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from ems.pool.tiers.codec import Compressor
from ems.pool.tiers.crew import Clock, Tell
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.seam import Tier
from ems.pool.tiers.settings import TierConfig
from ems.testing.faults.hands import Hands
from ems.testing.faults.place import Place
from ems.testing.faults.points import Points
from ems.testing.faults.times import Times

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
        self.hands: list[Hands] = []

    def crew(self, _name: str, count: int, tell: Tell, clock: Clock) -> Hands:
        """A crew, as a tier of a node has it made."""
        place = self._below.places[len(self.hands) // CREWS]
        hands = Hands(count, tell, clock, self._below.times, place.seconds)
        self.hands.append(hands)
        return hands

    def can_do(self) -> list[Callable[[], None]]:
        """All that can begin or end now."""
        able: list[Callable[[], None]] = []
        for hands in self.hands:
            if hands.can_begin():
                able.append(hands.begin)
            able += [partial(hands.end, one) for one in hands.can_end()]
        return able

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being done."""
        return any(hands.waiting or hands.running for hands in self.hands)

    def mend(self) -> None:
        """What hung does so no longer."""
        for hands in self.hands:
            hands.mend()

    def kill(self) -> None:
        """The process was killed."""
        for hands in self.hands:
            hands.kill()

    def counts(self) -> Counter[str]:
        """What they did."""
        return sum((hands.counts for hands in self.hands), Counter())


class Below:
    """The places of ``count`` tiers."""

    def __init__(self, count: int, times: Times, points: Points) -> None:
        self.times = times
        self.configs = CONFIGS[:count]
        self.places = [
            Place(times, points, config.kind, ROOM if number == 0 else None)
            for number, config in enumerate(self.configs)
        ]

    def open(self) -> list[tuple[TierConfig, Tier]]:
        """The tiers, for a process that begins."""
        return [(config, self.tier(number)) for number, config in enumerate(self.configs)]

    def tier(self, number: int) -> PackTier:
        """One tier, as any node opens it."""
        config = self.configs[number]
        compressor = Compressor(config.element) if config.compress == "zstd" else None
        return PackTier(
            config.name,
            self.places[number],
            limit=config.size,
            ttl=config.ttl,
            compressor=compressor,
            clock=self.times.wall,
        )

    def mend(self) -> None:
        """Nothing is wrong with any place."""
        for place in self.places:
            place.wrong.clear()
