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
_ATTEMPTS = 16


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One act: who (user and process), when (UTC), what was asked, and what came of it."""

    when: str
    uid: int
    pid: int
    verb: str
    what: dict[str, object] = {}
    result: str = "done"


def act(
    verb: str,
    what: Mapping[str, object] | None = None,
    result: str = "done",
    *,
    uid: int | None = None,
    pid: int | None = None,
    now: datetime | None = None,
) -> Act:
    """An act of ``verb`` with the plain values ``what``; by this process, unless another is named."""
    return Act(
        when=(now or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        uid=os.getuid() if uid is None else uid,
        pid=os.getpid() if pid is None else pid,
        verb=verb,
        what=dict(what or {}),
        result=result,
    )


class AuditLog:
    """The acts in ``path``; several processes may write at the same time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept

    def record(self, one: Act) -> None:
        """Add an act; on the disk when this returns.

        Raises:
            ConfigError: it cannot be written, so the act must not happen.
        """
        line = msgspec.json.encode(one) + b"\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                if self._append(line):
                    return
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {self.path}: {error.strerror}") from error
        raise ConfigError(f"cannot write the audit log {self.path}: it is replaced all the time")

    def _append(self, line: bytes) -> bool:
        """Add a line; False where somebody put the file aside in this very moment."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            facts = os.fstat(descriptor)
            if not facts.st_nlink or not os.path.samestat(facts, self.path.stat()):
                return False
            if facts.st_size and facts.st_size + len(line) > self._max_bytes:
                self._put_aside()
                return False
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, line)
            os.fsync(descriptor)
            return True
        except FileNotFoundError:
            return False
        finally:
            os.close(descriptor)

    def _put_aside(self) -> None:
        for number in range(self._kept, 0, -1):
            younger = self._aside(number - 1)
            if younger.exists():
                younger.replace(self._aside(number))

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
