"""A thread beside the engine's compute: jobs go in, what became of them is collected without waiting."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

CLOSE_SECONDS = 5.0
"""How long the end of the thread is waited for."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class Lane(Generic[Job, Result]):
    """``work`` runs in a thread called ``name``; it takes jobs by :meth:`next` until there is none left."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.news = False
        """Whether something may have ended since the last look; costs nothing to ask in each step."""
        self._thread = threading.Thread(target=work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        self._inbox.put(job)

    def next(self, timeout: float | None = None) -> Job | None:
        """The next job; None when the thread is to end.

        Raises:
            queue.Empty: none came in ``timeout`` seconds.
        """
        return self._inbox.get(timeout=timeout)

    @property
    def waiting(self) -> bool:
        """Whether there is another job, for the thread that does them."""
        return not self._inbox.empty()

    def ended(self, result: Result) -> None:
        self._results.put(result)
        self.news = True

    def results(self, wait: float = 0.0) -> list[Result]:
        """What became of jobs since the last call; waits at most ``wait`` seconds until there is something."""
        # Before the look: what ends from now on is news again.
        self.news = False
        results = []
        if wait:
            with contextlib.suppress(queue.Empty):
                results.append(self._results.get(timeout=wait))
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def end(self) -> None:
        """End the thread after the jobs that are queued, without waiting for that."""
        self._inbox.put(None)

    def close(self) -> None:
        self.end()
        self._thread.join(timeout=CLOSE_SECONDS)
