"""Places that fail on purpose: a place is what packs are kept in."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Sequence

from ems.errors import TierFailed
from ems.pool.tiers.blobs import Blob, Blobs

PATIENCE = 30.0


class FaultyBlobs:
    """A place that does what ``blobs`` does until it is told otherwise; what is set holds for all later calls."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.delay = 0.0
        """Seconds before each call."""
        self.failing = False
        """Every call fails."""
        self.full = False
        """Nothing can be written, as on a full disk."""
        self.flip_reads = False
        """One bit of what is read is wrong."""
        self.cut_reads = False
        """Only half of what is asked for is read."""
        self.torn_writes = False
        """Half of a blob is written, and the writer is told that all is well."""
        self.gate = threading.Event()
        """While it is not set, calls hang."""
        self.gate.set()
        self.works_for: int | None = None
        """So many calls work, and all that follow fail."""
        self.calls = 0

    def _begin(self) -> None:
        self.calls += 1
        if self.delay:
            time.sleep(self.delay)  # the injected latency itself
        if not self.gate.wait(PATIENCE):
            raise TierFailed("the test did not let this call go on")
        if self.works_for is not None:
            self.works_for -= 1
        if self.failing or (self.works_for is not None and self.works_for < 0):
            raise TierFailed("the test lets this place fail")

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self._begin()
        if self.full:
            raise TierFailed("no space left on device") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.torn_writes:
            whole = b"".join(parts)
            parts = [whole[: len(whole) // 2]]
        self._blobs.put(name, parts)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        self._begin()
        count = self._blobs.read(name, offset, into)
        if self.flip_reads and count:
            into[-1][len(into[-1]) // 2] ^= 16
        return count // 2 if self.cut_reads else count

    def blobs(self) -> Iterable[Blob]:
        self._begin()
        return self._blobs.blobs()

    def move(self, name: str, new: str) -> None:
        self._begin()
        self._blobs.move(name, new)

    def delete(self, names: Sequence[str]) -> None:
        self._begin()
        self._blobs.delete(names)

    def touch(self, name: str) -> None:
        self._begin()
        self._blobs.touch(name)

    def sweep(self, older: float) -> int:
        self._begin()
        return self._blobs.sweep(older)

    def room(self) -> int | None:
        return self._blobs.room()
