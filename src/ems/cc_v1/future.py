"""The future of a load or a save.

What always holds: it ends exactly once, at the latest when somebody looks after its deadline; and from its
end on nobody touches the engine's slots.  Whoever copies does so inside :meth:`CcFuture.copying`, which ends
before the deadline's verdict does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import msgspec

from ems.cc_v1.errors import EmsErrorCode, EmsException, code_of
from ems.errors import EmsError
from ems.pool.pages import ClusterWrite
from ems.transfers.summary import Kind

LEAST_CALL_SECONDS = 0.25
"""What a call to a node that is well needs at the very most."""


class CcResult(msgspec.Struct, frozen=True):
    """How many leading blocks were found, loaded or stored, of how many that were asked for."""

    success: int
    total: int


class CcFuture:
    """A load or save on its way, or over.  Always true, so that callers can write ``if future and ...``."""

    def __init__(
        self,
        kind: Kind,
        total: int,
        timeout: float,
        clock: Callable[[], float],
        ended: Callable[[CcFuture], None] | None = None,
    ) -> None:
        self.kind = kind
        self.total = total
        self.begin = clock()
        self.deadline = self.begin + timeout
        self.started = False
        self.progress = 0
        self.error: EmsError | None = None
        self.local_only = False
        self.cluster_write: ClusterWrite = ""
        """How far the work may reach, see :class:`~ems.pool.client.pool_client.PoolClient`."""
        self._clock = clock
        self._ended = ended
        self._done = threading.Event()
        self._process = os.getpid()
        self._copying = threading.Lock()

    # For whoever does the work

    def remaining(self) -> float:
        """Seconds that a call to the pool may take: until the deadline, but never less than a call needs.

        A call that is given up costs the connection, for the other transfers on it too; the future itself does
        not wait for the call.
        """
        return max(self.deadline - self._clock(), LEAST_CALL_SECONDS)

    @property
    def open(self) -> bool:
        return not self._done.is_set() and self._clock() < self.deadline

    @contextlib.contextmanager
    def copying(self) -> Iterator[bool]:
        """Engine memory may be touched inside, if the value is true; keep it short."""
        with self._copying:
            yield self.open

    def advance(self, progress: int) -> None:
        """So many leading blocks are done; what comes after the end does not count."""
        if not self._done.is_set():
            self.progress = progress

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the future lives."""
        self._done.wait(min(seconds, max(self.deadline - self._clock(), 0)))

    def finish(self, error: EmsError | None = None) -> None:
        """The work is over; ``error`` counts only where nothing was done at all.  Later calls change nothing."""
        self._end(error or (None if self._clock() < self.deadline else self._late()), wait=True)

    def _late(self) -> EmsException:
        waited = self.deadline - self.begin
        return EmsException(f"the {self.kind.value} was not done in {waited:.3f} s", EmsErrorCode.EMS_TIMEOUT)

    def _end(self, error: EmsError | None, *, wait: bool) -> None:
        if not self._copying.acquire(blocking=wait):
            return
        try:
            if self._done.is_set():
                return
            if self.progress == 0 and self.total:
                self.error = error
            self._done.set()
        finally:
            self._copying.release()
        if self._ended is not None:
            self._ended(self)

    # For whoever waits

    def _of_a_parent(self) -> bool:
        """Whether nobody in this process will ever end it: whoever does the work, and the locks, are in a parent."""
        return os.getpid() != self._process and not self._done.is_set()

    def ready(self) -> bool:
        """Whether it is over; never waits, and ends what is past its deadline.  In a forked child it is."""
        if self._of_a_parent():
            return True
        if not self._done.is_set() and self._clock() >= self.deadline:
            self._end(self._late(), wait=False)
        return self._done.is_set()

    def result(self) -> CcResult:
        """Wait until it is over, at most until the deadline and the end of a copy that is running then.

        Raises EmsException: nothing was done, and why; EMS_NOT_INITIALISED, a parent of this process has begun it.
        """
        if self._of_a_parent():
            told = f"the {self.kind.value} was begun by a parent of this process; a forked child begins its own"
            raise EmsException(told, EmsErrorCode.EMS_NOT_INITIALISED)
        if not self._done.wait(max(self.deadline - self._clock(), 0)):
            self._end(self._late(), wait=True)
        if self.error is not None:
            raise EmsException(str(self.error), code_of(self.error)) from self.error
        return CcResult(self.progress, self.total)
