"""Makes, runs and shrinks histories.

A history is its settings and a list of steps, all numbers; the same history always goes the same way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import structlog

from ems.config import POLICIES
from ems.pool.segments.reader import Verify
from tests.faults import invariants, lifecycle
from tests.faults.points import Crash
from tests.faults.settings import Settings, Violation
from tests.faults.steps import STEPS, kinds_for
from tests.faults.world import World

LENGTH = 60
"""Most steps of a history."""
CALM = {False: 0.1, True: 0.6}
"""Share of histories in which nodes seldom end, without tiers and with them: some things take several steps."""


class Step(msgspec.Struct, frozen=True):
    """One step: its kind and the numbers that say to whom and how."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.a} {self.b} {self.c}"


class History(Settings, frozen=True):
    """Settings, and what happens."""

    steps: list[Step]


class Report(msgspec.Struct):
    """What came of one history or of many."""

    histories: int = 0
    steps: Counter[str] = msgspec.field(default_factory=Counter)
    killed_at: Counter[str] = msgspec.field(default_factory=Counter)
    events: Counter[str] = msgspec.field(default_factory=Counter)
    writes: Counter[str] = msgspec.field(default_factory=Counter)
    violation: str | None = None

    def add(self, other: Report) -> None:
        """Count what came of others, too."""
        self.histories += other.histories
        self.steps.update(other.steps)
        self.killed_at.update(other.killed_at)
        self.events.update(other.events)
        self.writes.update(other.writes)
        self.violation = self.violation or other.violation


def generate(seed: int, length: int = LENGTH) -> History:
    """The history of ``seed``."""
    rng = random.Random(seed)
    tiers, tenants = rng.choice((0, 0, 1, 1, 2)), rng.random() < 0.4
    known = kinds_for(tiers=tiers > 0, tenants=tenants, calm=rng.random() < CALM[tiers > 0])
    kinds = [kind for kind, (_, weight) in known.items() for _ in range(weight)]
    count = rng.randint(length // 3, length)
    return History(
        [Step(rng.choice(kinds), *(rng.randrange(1 << 16) for _ in range(3))) for _ in range(count)],
        verify=rng.choice((*[Verify.ALWAYS] * 4, Verify.SAMPLED)),
        policy=rng.choice(POLICIES),
        watermark=rng.choice((1.0, 1.0, 0.8)),
        checksums_optional=rng.random() < 0.1,
        tiers=tiers,
        prompt=tiers > 0 and rng.random() < 0.6,
        tenants=tenants,
    )


def run(history: History, crash_at: int = -1) -> Report:
    """What comes of a history; with ``crash_at`` the node is killed at that write of it, too."""
    report = Report(1)
    with structlog.testing.capture_logs():
        world = World(history)
        lifecycle.begin(world)
        world.points.arm(crash_at)
        try:
            for step in history.steps:
                report.steps[step.kind] += 1
                _take(world, step)
            lifecycle.finish(world)
        except Exception as error:  # noqa: BLE001 - root of a history: whatever nobody expected is a finding, too
            report.violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            world.abandon()
    # Not before: what was logged may refer to errors, and they to files.
    try:
        world.close()
    except Violation as violation:
        report.violation = report.violation or str(violation)
    report.killed_at, report.events, report.writes = world.points.killed_at, world.counts, world.points.seen
    return report


def _take(world: World, step: Step) -> None:
    try:
        STEPS[step.kind][0](world, step.a, step.b, step.c)
        world.settle()
        if world.settings.prompt:
            lifecycle.work(world, 12, patient=False)
    except Crash:
        lifecycle.crashed(world)
    invariants.check(world)


def shrink(history: History, fails: Callable[[History], bool]) -> History:
    """A shorter history that fails, too: no step of it can be left out."""
    steps, size = history.steps, max(len(history.steps) // 2, 1)
    while True:
        for start in range(0, len(steps), size):
            shorter = msgspec.structs.replace(history, steps=steps[:start] + steps[start + size :])
            if fails(shorter):
                steps = shorter.steps
                break
        else:
            if size == 1:
                return msgspec.structs.replace(history, steps=steps)
            size //= 2


def sweep(history: History) -> Iterator[tuple[int, Report]]:
    """Run a history again and again, killing the node at each of its writes in turn; the place and what came of it."""
    writes = sum(run(history).writes.values())
    for place in range(writes):
        yield place, run(history, place)
