"""A place for packs that fails in every way a disk or an object store may, and outlives the nodes that use it.

It does nothing by itself: what is wrong with it is in :attr:`FaultyStore.wrong`, and holds until a history says
otherwise. What always holds: whatever it does, it counts it, so that a history can tell what it went through.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Sequence

from ems.errors import TierFailed
from ems.pool.tiers.blobs import Blob, Gone
from tests.faults.points import Points
from tests.faults.times import Times

FAULTS = (
    "fails",
    "times out",
    "is full",
    "flips bits",
    "cuts reads",
    "gives another's bytes",
    "fails half way",
    "tears writes",
    "forgets writes",
    "hides blobs",
    "is slow",
    "hangs",
)
"""What may be wrong with a place; most of them at the same time."""

SECONDS = {"is slow": 3.0, "times out": 8.0}
"""How long a piece of work takes while something is wrong; one that hangs takes for ever."""


class FaultyStore:
    """Blobs in this process; ``points`` may end the node at any write of one."""

    def __init__(self, times: Times, points: Points, kind: str, room: int | None = None) -> None:
        self.contents: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.unfinished = 0
        """What nodes left that were killed while they wrote."""
        self.wrong: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._times = times
        self._points = points
        self._kind = kind
        self._room = room

    def seconds(self) -> float:
        """How long a piece of work takes that begins now."""
        if "hangs" in self.wrong:
            return float("inf")
        return max((SECONDS[one] for one in self.wrong if one in SECONDS), default=0.05)

    def _is(self, fault: str) -> bool:
        if fault not in self.wrong:
            return False
        self.counts[fault] += 1
        return True

    def _begin(self) -> None:
        if self._is("fails"):
            raise TierFailed("500 internal server error")
        if self._is("times out"):
            raise TierFailed("no answer in time")

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """As :class:`~ems.pool.tiers.blobs.Blobs` says, and so on."""
        self._begin()
        whole = b"".join(parts)
        size = sum(map(len, self.contents.values())) + len(whole)
        if self._is("is full") or (self._room is not None and size > self._room):
            raise TierFailed("no space left on device") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._is("forgets writes"):
            return
        pins = whole[: len(whole) // 2] if self._is("tears writes") else whole

        def do(part: bytes | memoryview) -> None:
            if len(part) < len(whole):  # the node was killed here: its piece has no name yet
                self.unfinished += 1
                return
            self.contents[name], self.modified[name] = pins, self._times.wall()

        self._points.write(f"{self._kind}'s blob", whole, do)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        self._begin()
        if name not in self.contents:
            raise Gone(name)
        content = self.contents[name]
        others = [one for other, one in self.contents.items() if other != name]
        if others and self._is("gives another's bytes"):
            content = others[-1]
        raw, done = content[offset:], 0
        for part in into:
            piece = raw[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
        if done and self._is("flips bits"):
            into[-1][len(into[-1]) // 2] ^= 16
        if self._is("fails half way"):
            into[0][:] = bytes(len(into[0]))
            raise TierFailed("the connection ended in the middle")
        return done // 2 if self._is("cuts reads") else done

    def blobs(self) -> Iterable[Blob]:
        self._begin()
        known = list(self.contents)
        if self._is("hides blobs"):
            known = known[::2]
        return [Blob(name, len(self.contents[name]), self.modified[name]) for name in known]

    def move(self, name: str, new: str) -> None:
        self._begin()
        if name not in self.contents:
            raise Gone(name)

        def do(part: bytes | memoryview) -> None:
            assert not part
            self.contents[new], self.modified[new] = self.contents.pop(name), self.modified.pop(name)

        self._points.write(f"{self._kind}'s move", b"", do)

    def delete(self, names: Sequence[str]) -> None:
        self._begin()
        for name in names:
            if name in self.contents:
                self._points.write(f"{self._kind}'s delete", b"", lambda _, gone=name: self._drop(gone))  # type: ignore[misc]

    def _drop(self, name: str) -> None:
        self.contents.pop(name, None)

    def touch(self, name: str) -> None:
        self._begin()
        if name in self.contents:
            self.modified[name] = self._times.wall()

    def sweep(self, older: float) -> int:
        self._begin()
        if not older:
            return 0
        found, self.unfinished = self.unfinished, 0
        return found

    def room(self) -> int | None:
        return self._room
