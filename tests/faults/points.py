"""Ends a node between any two writes that it makes to its segments and files, or in the middle of one.

The node is the real one; only its writes into segments and the files that it opens are counted.  What always holds: a
node that ended changes nothing any more, whatever is cleaned up behind it.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ems.config import NodeConfig
from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET
from ems.pool.node.pool_node import Node
from ems.pool.node.restart import KeptOpen
from ems.pool.segments.arena import Arena
from ems.pool.segments.segment_file import Bytes, SegmentFile
from ems.pool.segments.tail_file import TailFile


class Crash(BaseException):
    """The node was killed here."""


class Points:
    """Counts the writes of a node; kills it at the one that it was armed for."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: Counter[str] = Counter()
        """Writes by kind."""
        self.killed_at: Counter[str] = Counter()
        """Ends of nodes by the kind of write."""
        self.full = False
        """Whether memory has no room for more files, nor for more in those that grow."""
        self.dead = False
        self._left = -1
        self._share = 0.0

    def arm(self, after: int, share: float = 0.0) -> None:
        """Kill the node at its write number ``after`` from now (0 is the next), of which ``share`` is still made."""
        self._left, self._share = after, share

    def disarm(self) -> None:
        """Let the node live."""
        self._left = -1

    def kill(self) -> None:
        """End the node."""
        self.dead = True
        raise Crash

    def write(self, kind: str, data: bytes | memoryview, do: Callable[[bytes | memoryview], Any]) -> int:
        """``do`` the write of ``data`` unless the node ends at it or has ended; how many bytes were written."""
        if self.dead:
            return len(data)
        self.count += 1
        self.seen[kind] += 1
        self._left -= 1
        if self._left == -1:
            cut = int(len(data) * self._share)
            if cut:
                do(data[:cut])
            self.killed_at[f"{kind}, torn" if 0 < cut < len(data) else kind] += 1
            self.kill()
        do(data)
        return len(data)


class CrashingFile(SegmentFile):
    """A segment whose writes are counted by :attr:`points`."""

    points: Points

    def write(self, offset: int, data: Bytes) -> bool:
        """Write, unless the node ends here."""
        kind = "description" if offset < HEADERS_OFFSET else "state" if len(data) < HEADER_BYTES else "header"
        self.points.write(kind, memoryview(data), lambda part: super(CrashingFile, self).write(offset, part))
        return True


class CrashingTails(TailFile):
    """The file of tokens, whose writes are counted."""

    def __init__(self, path: Path, points: Points) -> None:
        super().__init__(path)
        self._points = points

    def _write(self, file: int, data: bytes | memoryview) -> int:
        if self._points.full:
            if len(data) < HEADER_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: len(data) // 2]  # what a file system that runs full does
        return self._points.write("tail", data, lambda part: super(CrashingTails, self)._write(file, part))

    def _rename(self, new: Path) -> None:
        self._points.write("rename", b"", lambda _: super(CrashingTails, self)._rename(new))


class CrashingArena(Arena):
    """Segments whose writes are counted."""

    def __init__(self, config: NodeConfig, node_id: bytes, lock: int | None, points: Points) -> None:
        self._points = points
        super().__init__(config, node_id, lock)

    def _file(self, descriptor: int, size: int) -> SegmentFile:
        file = CrashingFile(descriptor, size)
        file.points = self._points
        return file

    def _new_file(self, path: Path) -> int:
        if self._points.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._points.write("file", b"", lambda _: None)
        return super()._new_file(path)

    def _tail_file(self) -> TailFile:
        return CrashingTails(self._folder.tails, self._points)

    def close(self, *, keep: bool = True, log: bool = False) -> None:
        """Let go; a node that was killed cleans nothing up."""
        if self._points.dead:
            self.leave()
        else:
            super().close(keep=keep, log=log)


class CrashingNode(Node):
    """A node whose writes are counted.  Nobody can connect to it: its verbs are called as a connection would."""

    def __init__(
        self, config: NodeConfig, clock: Callable[[], float], points: Points, pins: KeptOpen | None = None
    ) -> None:
        self._points = points
        super().__init__(config, clock, pins)

    def _new_arena(self) -> Arena:
        lock = self._kept.lock if self._kept is not None else None
        return CrashingArena(self.config, self.node_id, lock, self._points)
