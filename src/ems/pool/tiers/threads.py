"""Threads that do what may block, and tell the event loop when it is done.

What always holds: a job is run once or called off, never both; its end is told on the loop's own thread; a job that
hangs costs its thread and nothing else.  The threads are daemons: a node that ends does not wait for a dead disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[[Callable[[], None]], None]
"""Has a call made on the loop's thread; does nothing when the loop has ended."""
Clock = Callable[[], float]


class Job:
    """One piece of work: ``work`` is done on a thread, ``ended(result, error)`` is told on the loop's."""

    def __init__(self, work: Callable[[], Any], ended: Callable[[Job], None]) -> None:
        self._work = work
        self._ended = ended
        self._lock = threading.Lock()
        self._claimed = False
        self.given_at: float | None = None
        """When a crew got it."""
        self.started_at: float | None = None
        self.seconds = 0.0
        self.result: Any = None
        self.error: Exception | None = None
        self.abandoned = False
        """Whether nobody waits for its end any more; for the loop alone."""
        self.done = threading.Event()

    def call_off(self) -> bool:
        """See to it that it is never begun; False when it was begun already."""
        with self._lock:
            mine, self._claimed = not self._claimed, True
        return mine

    def begin(self, now: float) -> bool:
        """It is this thread's from now on; False when it was called off, or is another's."""
        if not self.call_off():
            return False
        self.started_at = now
        return True

    def run(self, tell: Tell, clock: Clock) -> None:
        """Do it on this thread, which has begun it."""
        assert self.started_at is not None
        try:
            self.result = self._work()
        except Exception as error:  # noqa: BLE001 - root of what this thread does: the loop decides what it means
            self.error = error
        self.seconds = clock() - self.started_at
        self.done.set()
        tell(lambda: self._ended(self))


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
        job.given_at = self._clock()
        self._jobs.put(job)

    def wait(self, job: Job, until: float) -> None:
        """Hold this thread up until ``job`` is done, or until then."""
        job.done.wait(max(until - self._clock(), 0))

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
