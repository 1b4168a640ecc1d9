"""Files that are read again when they change: keys, certificates, manifests.

What always holds: a file that is gone or makes no sense changes nothing, and is said once; one with secrets that others
may read is refused.  A look costs a few microseconds, so it is made in the event loop; the file is read there too: it
is small and on a local disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from ems.errors import ConfigError

POLL_SECONDS = 1.0
MAX_BYTES = 16 << 20

log = logging.getLogger("ems.files")


def read(path: Path, *, what: str, secret: bool = False) -> bytes:
    """The bytes of a file.

    :raises ConfigError: it cannot be read, is too large, or is secret and can be read by others.
    """
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if secret and facts.st_mode & 0o077:
                raise ConfigError(f"{path} can be read or written by others: make it private with 'chmod 600 {path}'")
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path} is no file: expected {what}")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Cannot read {what} {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} {path} has more than {MAX_BYTES} bytes")
    return data


class WatchedFile:
    """Calls ``load`` when the file, or one of those that ``files`` lists, is another one than at the last look."""

    def __init__(self, path: Path, load: Callable[[], None], files: Callable[[], Iterable[Path]] | None = None) -> None:
        self._path = path
        self._load = load
        self._files = files or (lambda: (path,))
        self._seen = self._stamp()

    def look(self, *, anyway: bool = False) -> None:
        """Look at the file, or ``anyway`` read it again."""
        stamp = self._stamp()
        if stamp == self._seen and not anyway:
            return
        self._seen = stamp  # before reading: what changes meanwhile is read once more
        try:
            self._load()
        except ConfigError as error:
            log.error("%s; what was read before still counts", error)  # noqa: TRY400  a mistake in a file has no trace
        else:
            log.info("Read %s again", self._path)

    def _stamp(self) -> list[tuple[str, int, int, int]]:
        stamps = []
        for path in self._files():
            with contextlib.suppress(OSError):
                facts = path.stat()
                stamps.append((path.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return stamps


class WatchedFiles:
    """All that one process looks at."""

    def __init__(self) -> None:
        self._all: list[WatchedFile] = []

    def watch(
        self,
        path: Path,
        load: Callable[[], None],
        *,
        loaded: bool = False,
        files: Callable[[], Iterable[Path]] | None = None,
    ) -> None:
        """Read a file, or all of some, unless that was done, and again whenever it changes."""
        watched = WatchedFile(path, load, files)
        if not loaded:
            load()
        self._all.append(watched)

    def look(self, *, anyway: bool = False) -> None:
        """Look at all files, or ``anyway`` read them again."""
        for watched in self._all:
            watched.look(anyway=anyway)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self.look()
            except Exception:  # the root of the task: a defect must not end the looking
                log.exception("Looking for what has changed failed by a defect")
