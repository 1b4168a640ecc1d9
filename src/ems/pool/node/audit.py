"""Who changed what, and when: a line of JSON for each administrative act, in a file that its owner alone can read.

What always holds: an act is in the file before whoever asked is told that it is done; the file is bounded, and so is
the number of older ones beside it; no secret is ever handed to this module.  Writing goes to a disk and may block: a
node does it away from its event loop.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ems.errors import ConfigError

MAX_BYTES = 8 << 20
"""Size at which the file is put aside and a new one begun."""
KEPT = 4
"""Older files that are kept: ``audit.jsonl.1`` is the youngest of them."""
NAME = "audit.jsonl"


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One act: when (UTC), who (user and process, unless another is named this one), what was asked and came of it."""

    when: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    uid: int = msgspec.field(default_factory=os.getuid)
    pid: int = msgspec.field(default_factory=os.getpid)
    verb: str
    what: Mapping[str, object] = {}
    result: str = "done"


class AuditLog:
    """The acts in ``path``; several processes may write at the same time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept

    def record(self, one: Act) -> None:
        """Add an act; on the disk when this returns.

        Raises ConfigError: it cannot be written, so the act must not happen.
        """
        line = msgspec.json.encode(one) + b"\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                self._append(line)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {self.path}: {error.strerror}") from error

    def _append(self, line: bytes) -> None:
        if self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes:
            self._put_aside()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _put_aside(self) -> None:
        for number in range(self._kept, 0, -1):
            younger = self._aside(number - 1)
            if younger.exists():
                younger.replace(self._aside(number))

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
