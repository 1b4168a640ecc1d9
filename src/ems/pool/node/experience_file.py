"""Keeps what the policies have learned in a file of the node's folder: at a clean stop, and now and then before.

What always holds: the loop takes down a few pages at a time and waits for no file; the file is one that was written
whole; a node that cannot read or write it serves all the same and says so once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path

import structlog

from ems.pool.core.index import Index
from ems.pool.policy.experience import LARGEST, Experience, all_at_once, pack_experience, take_down, unpack_experience
from ems.pool.segments.folder import EXPERIENCE_NAME

EVERY_SECONDS = 60.0
"""From the end of one writing to the beginning of the next: what a crash costs at most."""
PAUSE_SECONDS = 0.02
"""Between two steps of a millisecond: taking it down slows nobody noticeably."""

Taking = Generator[None, None, list[Experience]]

_log = structlog.get_logger("ems.node")


class ExperienceFile:
    """The file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EXPERIENCE_NAME
        self._told = False

    def read(self) -> dict[str, Experience]:
        """What was written by namespace; nothing where it is not there or cannot be used."""
        try:
            with self._path.open("rb") as file:
                return unpack_experience(file.read(LARGEST + 1))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning("what the eviction policy had learned cannot be used, it learns anew", reason=str(error))
            return {}

    def write(self, known: Iterable[Experience]) -> None:
        """Replace what is there; where that fails, what was there stays."""
        # A name of its own: the process before this one may be writing still.
        new = self._path.with_name(f"{EXPERIENCE_NAME}.{os.getpid()}.new")
        try:
            for other in self._path.parent.glob(f"{EXPERIENCE_NAME}.*.new"):
                other.unlink(missing_ok=True)
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "wb") as out:
                out.writelines(pack_experience(known))
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            if not self._told:
                self._told = True
                _log.warning("what the eviction policy learned cannot be written down", reason=error.strerror)


class ExperienceKeeper:
    """Writes down now and then what the policies of ``namespaces`` know, the most important first."""

    def __init__(
        self, folder: Path, loop: asyncio.AbstractEventLoop, namespaces: Callable[[], Iterable[tuple[str, Index]]]
    ) -> None:
        self._file = ExperienceFile(folder)
        self._loop = loop
        self._namespaces = namespaces
        self._next: asyncio.TimerHandle | None = None
        self._writer: threading.Thread | None = None

    def read(self) -> Mapping[str, Experience]:
        """What an earlier node knew, by namespace."""
        return self._file.read()

    def start(self) -> None:
        """Begin to write now and then."""
        self._next = self._loop.call_later(EVERY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._step(take_down(self._namespaces()))

    def _step(self, taking: Taking) -> None:
        try:
            next(taking)
        except StopIteration as end:
            self._write(end.value)
            self.start()
        else:
            self._next = self._loop.call_later(PAUSE_SECONDS, self._step, taking)

    def _write(self, known: list[Experience]) -> None:
        if known and (self._writer is None or not self._writer.is_alive()):
            self._writer = threading.Thread(target=self._file.write, args=(known,), name="ems-experience", daemon=True)
            self._writer.start()

    def leave(self) -> None:
        """Write no more: another process does."""
        if self._next is not None:
            self._next.cancel()

    def stop(self) -> None:
        """Write all of it down for the next start, now that nobody is served any more."""
        self.leave()
        if self._writer is not None:
            self._writer.join()
        self._file.write(all_at_once(self._namespaces()))
