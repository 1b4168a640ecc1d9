"""The file of tenants: read whole, replaced whole, read again when it changed, and private to its user.

What always holds: whoever reads it sees one revision or another, never a mixture; two changes at the same time come one
after the other; a file that others may read or change is refused.  A node goes on with what it read last and made
sense: a file that is gone or makes no sense changes nothing and is said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from ems.errors import ConfigError
from ems.pool.files import replace_file
from ems.pool.tenants.registry import SECRET_BYTES, Registry

MAX_BYTES = 16 << 20
"""Bytes of the largest file that is read."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - to be refused

POLL_SECONDS = 0.5
"""How soon a node notices a change: a look at a file's size and times costs a few microseconds."""

_log = structlog.get_logger("ems.node")
_decoder = msgspec.json.Decoder(Registry)


Stamp = tuple[int, int, int]
"""What tells one state of the file from another without reading it: its inode, its size, when it changed."""


def stamp(path: Path) -> Stamp | None:
    """The state of the file; None when it cannot be seen."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def read(path: Path) -> Registry:
    """The tenants in ``path``.  Raises ConfigError: there is no such file, or it cannot be trusted or understood."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _refuse_if_shared(path, os.fstat(descriptor))
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no tenants file {path}, make one with 'ems tenant add NAME --tenants {path}'"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the tenants file {path} has more than {MAX_BYTES} bytes, which no list of tenants needs")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no tenants file: {error}; restore it from a copy") from error


def _refuse_if_shared(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path} is no file, give another one with --tenants")
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to user {facts.st_uid}, who could let anybody in, expected {os.geteuid()}")
    if facts.st_mode & 0o077:
        raise ConfigError(f"{path} can be read or written by others, make it private with 'chmod 600 {path}'")


@contextlib.contextmanager
def changing(path: Path, *, create: bool = False) -> Iterator[Registry]:
    """The tenants in ``path`` while nobody else changes them; with ``create`` none where there is no file yet.

    Raises ConfigError: as :func:`read` does, or the folder cannot be used.
    """
    if path.absolute().is_relative_to(_SHARED_MEMORY):
        raise ConfigError(f"{path} is in memory and gone with the next start of this host, give a file on a disk")
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use the folder of {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if create and not path.exists():
            yield Registry(secret=secrets.token_bytes(SECRET_BYTES))
        else:
            yield read(path)
    finally:
        os.close(lock)


def write(path: Path, registry: Registry) -> None:
    """Put ``registry`` into ``path`` in one step that also outlives a power cut; within :func:`changing`.

    Raises ConfigError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        replace_file(path, new, [msgspec.json.format(msgspec.json.encode(registry))], sync=True)
    except OSError as error:
        raise ConfigError(f"cannot write the tenants file {path}: {error.strerror}") from error


class TenantsWatch:
    """Calls ``changed`` with each new registry in ``path``, from a thread of its own: a disk may hang."""

    def __init__(self, path: Path, known: Stamp | None, changed: Callable[[Registry], None]) -> None:
        self._path = path
        self._known = known
        self._changed = changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ems-tenants", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Never waits for a disk that hangs."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        seen = stamp(self._path)
        if seen == self._known:
            return
        self._known = seen
        try:
            registry = read(self._path)
        except ConfigError as error:
            _log.error("the tenants file cannot be used, what was in it before still counts", reason=str(error))
            return
        if not self._stop.is_set():
            self._changed(registry)
