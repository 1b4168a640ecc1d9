"""A thread that does one thing after the other, apart from the engine's own threads."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Worker:
    """Runs what it is given in order.  A daemon: an engine that ends does not wait for it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue ``job``, which must not raise; returns at once."""
        self._jobs.put(job)

    def close(self, timeout: float) -> None:
        """End after the jobs that are queued; waits for at most ``timeout`` seconds."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
