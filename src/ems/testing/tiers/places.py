"""Places and tiers that fail on purpose.

A place is what packs are kept in.  Nothing goes wrong before a test says so.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ems.errors import TierFailed
from ems.pool.keys import Tail
from ems.pool.tiers.blobs import Blob, Blobs, Gone
from ems.pool.tiers.seam import Forgotten, Holding, Meant, Outcome, Run, Stored, StoredTail, Tier, Wanted
from ems.testing.tiers.pages import PATIENCE


class MemoryBlobs:
    """A place in this process, whose blobs a test may change as it likes: ``contents`` by name."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self.contents[name] = b"".join(parts)
        self.modified[name] = time.time()

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        if name not in self.contents:
            raise Gone(name)
        raw, done = self.contents[name][offset:], 0
        for part in into:
            piece = raw[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
        return done

    def blobs(self) -> Iterable[Blob]:
        return [Blob(name, len(raw), self.modified[name]) for name, raw in list(self.contents.items())]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.contents.pop(name, None)

    def touch(self, name: str) -> None:
        if name in self.contents:
            self.modified[name] = time.time()

    def sweep(self, older: float) -> int:
        assert older
        return 0

    def room(self) -> int | None:
        return None


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

    @property
    def lies(self) -> bool:
        """Whether what is read may not be what was written."""
        return self.flip_reads or self.cut_reads or self.torn_writes

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


class FaultyTier:
    """A tier that does what ``tier`` does until it is told otherwise."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.delay = 0.0
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def _begin(self) -> None:
        self.calls += 1
        if self.delay:
            time.sleep(self.delay)  # the injected latency itself
        if not self.gate.wait(PATIENCE):
            raise TierFailed("the test did not let this call go on")
        if self.failing:
            raise TierFailed("the test lets this tier fail")

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self._tier.holds(namespace, keys)

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        return self._tier.find_tail(namespace, tail)

    def namespaces(self) -> dict[str, Holding]:
        return self._tier.namespaces()

    def recent(self, namespace: str) -> Iterator[Run]:
        return self._tier.recent(namespace)

    def forget(self, meant: Meant, *, dry_run: bool = False) -> Forgotten:
        self._begin()
        return self._tier.forget(meant, dry_run=dry_run)

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        self._begin()
        return self._tier.store(namespace, pages)

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        self._begin()
        return self._tier.load(namespace, wanted)

    def maintain(self, *, probe: bool = False) -> None:
        self._begin()
        self._tier.maintain(probe=probe)

    def figures(self) -> dict[str, Any]:
        return self._tier.figures()

    def close(self) -> None:
        self._tier.close()
