"""The folder of one node: whose it is, which node holds it, what is in it.

What always holds: one living node a folder (a lock on a file in it says so, and the kernel drops the lock
however the process ends); nobody else may write into it; a node that stops leaves nothing of its own behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ems.errors import ConfigError

LOG_NAME = "node.log"
"""What a node that was started by an engine says."""
STOP_SECONDS = 3.0
"""How long a node may take from closing its socket to leaving its folder."""
_POLL_SECONDS = 0.05
_LOCK_NAME = "node.lock"
_SEGMENT = re.compile(r"segment-\d{5,}")
_REMEDY = "give a writable tmpfs folder of its own with --dir"


def make_folder(path: Path) -> None:
    """Make sure that ``path`` is a folder of this user that nobody else may write into.

    Raises:
        ConfigError: it cannot be, with the reason.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot use {path} for a pool node: {error.strerror}; {_REMEDY}") from error
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could put anything into the pool, expected one of user "
            f"{os.geteuid()}; {_REMEDY}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        if status.st_mode & stat.S_ISVTX:
            raise ConfigError(f"{path} is a folder for everybody, expected one for the node alone; {_REMEDY}")
        path.chmod(0o700)


class Folder:
    """The folder ``path``, held by this node until :meth:`close`.

    A node that is about to stop gets ``patience`` seconds to leave.

    Raises:
        ConfigError: another node holds it, or it cannot be used.
    """

    def __init__(self, path: Path, patience: float = STOP_SECONDS) -> None:
        self.path = path
        self._lock = _lock(path, time.monotonic() + patience)

    def segment(self, number: int) -> Path:
        """The file of segment ``number``."""
        return self.path / f"segment-{number:05d}"

    def remove_segments(self) -> None:
        """Remove the segments in it, also those of a node that died."""
        for entry in self.path.iterdir():
            if _SEGMENT.fullmatch(entry.name):
                entry.unlink(missing_ok=True)

    def close(self, *, log: bool) -> None:
        """Remove what is the node's, its log if ``log``, and let others have the folder."""
        with contextlib.suppress(OSError):
            self.remove_segments()
            if log:
                (self.path / LOG_NAME).unlink(missing_ok=True)
            # Whoever waits for the lock finds that its file is gone and begins anew.
            (self.path / _LOCK_NAME).unlink(missing_ok=True)
            self.path.rmdir()
        os.close(self._lock)


def _lock(path: Path, deadline: float) -> int:
    lock_path = path / _LOCK_NAME
    while True:
        make_folder(path)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # A node that stopped in this very moment removed the folder.
        except OSError as error:
            raise ConfigError(f"cannot use {path} for a pool node: {error.strerror}; {_REMEDY}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, 20).decode(errors="replace").strip()
            os.close(lock)
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
                continue
            raise ConfigError(
                f"a node is already running in {path}{f' (process {holder})' if holder else ''}; use it, stop it "
                "with 'ems stop', or give another --dir"
            ) from error
        if _is_at(lock, lock_path):
            with contextlib.suppress(OSError):  # only for the message above; memory may be full
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return lock
        os.close(lock)


@contextlib.contextmanager
def starting(path: Path) -> Iterator[bool]:
    """Hold the right to start a node in ``path`` if nobody else has it; yields whether this caller has.

    The lock is on the folder itself, so that it leaves nothing behind.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = _lock_folder(path)
    try:
        yield folder is not None
    finally:
        if folder is not None:
            os.close(folder)


def _lock_folder(path: Path) -> int | None:
    while True:
        make_folder(path)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            return None
        if _is_at(folder, path):
            return folder
        os.close(folder)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
