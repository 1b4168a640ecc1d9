"""Where lines of the access log go: standard output, or a file that may be rotated.

A thread writes, since a pipe that nobody reads, or a disk, may hang.  What always holds: a request never waits for its
line; lines that nobody takes are dropped and counted; a file that was renamed or deleted is opened anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import stat
import sys
import threading
from pathlib import Path
from typing import Final

from ems.errors import ConfigError

FLUSH_SECONDS: Final = 0.1
MOST_LINES: Final = 65536
"""Lines that wait at most."""

log = logging.getLogger("ems.http")


class AccessLog:
    """Lines in the order in which requests ended."""

    def __init__(self, output: str = "stdout", *, shared: bool = False) -> None:
        self._path = None if output == "stdout" else Path(output)
        self._descriptor = sys.stdout.fileno() if self._path is None else _open(self._path)
        self._one_by_one = shared and not stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        """Whether a line is a write of its own: into a larger one all but a file may put lines of other processes."""
        self._lines: list[bytes] = []
        self._batches: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._queued = 0
        self._taken = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._write, name="ems-access-log", daemon=True)
        self._thread.start()
        self.dropped = 0

    def add(self, line: bytes) -> None:
        if self._queued - self._taken + len(self._lines) >= MOST_LINES:
            self.dropped += 1
            return
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def close(self) -> None:
        """Write what is left, for a second at most."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        self._batches.put(None)
        self._thread.join(1.0)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._descriptor)

    def _flush(self) -> None:
        self._timer = None
        if self._lines:
            self._queued += len(self._lines)
            self._batches.put(self._lines)
            self._lines = []

    def _write(self) -> None:
        failed = False
        while (lines := self._batches.get()) is not None:
            try:
                self._reopen()
                for piece in lines if self._one_by_one else (b"".join(lines),):
                    left = memoryview(piece)
                    while left:
                        left = left[os.write(self._descriptor, left) :]
                failed = False
            except (OSError, ConfigError) as error:
                self.dropped += len(lines)
                if not failed:
                    log.warning("Lines of the access log are lost: %s", error)
                failed = True
            self._taken += len(lines)

    def _reopen(self) -> None:
        if self._path is None:
            return
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            new = _open(self._path)
            os.close(self._descriptor)
            self._descriptor = new


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigError(f"Cannot write the access log {path}: {error.strerror}") from None
