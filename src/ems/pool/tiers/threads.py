"""Threads that do what may block, and tell the event loop when it is done.

What always holds: a job is run once or called off, never both; its end is told on the loop's own thread; a job that
hangs costs its thread and nothing else.  The threads are daemons: a node that ends does not wait for a dead disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

Tell = Callable[[Callable[[], None]], None]
"""Has a call made on the loop's thread; does nothing when the loop has ended."""
Clock = Callable[[], float]


class Job(Future[Any]):
    """One piece of work: ``work`` is done on a thread, ``ended(job)`` is told on the loop's.

    :meth:`cancel` sees to it that it is never begun, unless it was.
    """

    def __init__(self, work: Callable[[], Any], ended: Callable[[Job], None]) -> None:
        super().__init__()
        self._work = work
        self._ended = ended
        self.started_at: float | None = None
        self.seconds = 0.0
        self.abandoned = False
        """Whether nobody waits for its end any more; for the loop alone."""

    def begin(self, now: float) -> bool:
        """It is this thread's from now on; False when it was called off."""
        if not self.set_running_or_notify_cancel():
            return False
        self.started_at = now
        return True

    def run(self, tell: Tell, clock: Clock) -> None:
        """Do it on this thread, which has begun it."""
        assert self.started_at is not None
        try:
            self.set_result(self._work())
        except Exception as error:  # noqa: BLE001 - root of what this thread does: the loop decides what it means
            self.set_exception(error)
        self.seconds = clock() - self.started_at
        tell(lambda: self._ended(self))

    def runs_for(self, now: float) -> float:
        """How many seconds a thread is busy with it."""
        return 0.0 if self.started_at is None or self.done() else now - self.started_at


class ThreadPool:
    """``count`` threads that take jobs in order, and look at ``clock`` when they begin and end one."""

    def __init__(self, name: str, count: int, tell: Tell, clock: Clock = time.monotonic) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tell = tell
        self._clock = clock
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def give(self, job: Job) -> None:
        self._jobs.put(job)

    def wait(self, job: Job, until: float) -> None:
        """Hold this thread up until ``job`` is done, or until then."""
        wait([job], max(until - self._clock(), 0))

    def dismiss(self) -> None:
        """No more jobs come; threads end when they have done what was given."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.begin(self._clock()):
                job.run(self._tell, self._clock)


NewThreadPool = Callable[[str, int, Tell, Clock], ThreadPool]
"""Has a crew: its name, how many, whom they tell, what time it is."""
