"""The file of tenants: read whole, replaced whole, and nobody's business but its owner's.

What always holds: whoever reads it sees one revision or another, never a mixture; two changes at the same time come one
after the other; a file that others may read or change is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ems.errors import ConfigError
from ems.pool.tenants.registry import SECRET_BYTES, Registry

MAX_BYTES = 16 << 20
"""Bytes of the largest file that is read."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - to be refused

_decoder = msgspec.json.Decoder(Registry)


class Stamp(msgspec.Struct, frozen=True):
    """What tells one state of the file from another without reading it."""

    inode: int
    size: int
    changed: int


def stamp(path: Path) -> Stamp | None:
    """The state of the file; None when it cannot be seen."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return Stamp(facts.st_ino, facts.st_size, facts.st_mtime_ns)


def read(path: Path) -> Registry:
    """The tenants in ``path``.

    Raises:
        ConfigError: there is no such file, or it cannot be trusted or understood.
    """
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

    Raises:
        ConfigError: as :func:`read` does, or the folder cannot be used.
    """
    refuse_shared_memory(path)
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

    Raises:
        ConfigError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(registry)))
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the tenants file {path}: {error.strerror}") from error


def refuse_shared_memory(path: Path) -> None:
    """Refuse a place that is empty after the next start of the host.

    Raises:
        ConfigError: it is one.
    """
    if path.absolute().is_relative_to(_SHARED_MEMORY):
        raise ConfigError(f"{path} is in memory and gone with the next start of this host, give a file on a disk")
