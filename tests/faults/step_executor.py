"""Threads of a tier as histories have them: each piece of work begins when it is told to and ends when it is told to.

What always holds: nothing happens by itself; a thread does one thing at a time; what was begun by a node that
ended never ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from math import inf

from ems.pool.tiers.threads import Clock, Job, Tell, ThreadPool
from tests.faults.times import Times


class Running:
    """What one thread does: ``due`` is when it can end."""

    __slots__ = ("due", "job")

    def __init__(self, job: Job, due: float) -> None:
        self.job = job
        self.due = due


class StepExecutor(ThreadPool):
    """A crew of ``count`` that works when told; ``seconds`` says how long a piece of work takes that begins now."""

    def __init__(self, count: int, tell: Tell, clock: Clock, times: Times, seconds: Callable[[], float]) -> None:
        self._count = count
        self._tell = tell
        self.clock = clock
        self._times = times
        self._seconds = seconds
        self.waiting: deque[Job] = deque()
        self.running: list[Running] = []
        self.counts: Counter[str] = Counter()

    def give(self, job: Job) -> None:
        self.waiting.append(job)

    def dismiss(self) -> None:
        """What was given is done all the same, by threads that nobody waits for."""

    # What histories say

    def can_begin(self) -> bool:
        """Whether there is something to begin, and a thread."""
        return bool(self.waiting) and len(self.running) < self._count

    def begin(self) -> None:
        """A thread takes what waits for longest."""
        job = self.waiting.popleft()
        if job.begin(self.clock()):
            self.running.append(Running(job, self._times.passed + self._seconds()))
        else:
            self.counts["called off"] += 1

    def can_end(self) -> list[Running]:
        """What can end now."""
        return [one for one in self.running if one.due <= self._times.passed]

    def end(self, one: Running) -> None:
        """A thread does what it began, all of it in this moment, and tells."""
        self.running.remove(one)
        if one.job.abandoned:
            self.counts["ended after it was given up"] += 1
        one.job.run(self._tell, self.clock)
        self.counts["work of a tier"] += 1
        self.counts["work of a tier that failed"] += one.job.exception() is not None

    def wait(self, job: Job, until: float) -> None:
        """Whoever waits lets the threads work, and waits no longer than it said."""
        while not job.done():
            for one in self.can_end():
                self.end(one)
            if self.can_begin():
                self.begin()
                continue
            left = until - self.clock()
            due = min((one.due for one in self.running), default=inf)
            if job.done() or left <= 0:
                return
            self._times.passed += min(max(due - self._times.passed, 0.0), left)
            if due == inf:
                self.counts["a stop that did not wait for a tier"] += 1
                return

    def kill(self) -> None:
        """The process was killed."""
        self.waiting.clear()
        self.running.clear()

    def mend(self) -> None:
        """What hung does so no longer."""
        for one in self.running:
            one.due = min(one.due, self._times.passed)
