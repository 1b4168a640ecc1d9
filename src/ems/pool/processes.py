"""Other processes of this host: whether they live, and whose a node is before anything of it is believed.

A folder in shared memory can be made by anybody who is first, and a socket in it answers like a node.  What always
holds: a place counts as this user's only if its folder, its socket and the process behind that belong to this user or
to root, whoever links lead there by.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from pathlib import Path

from ems.errors import Unauthorised
from ems.pool.layout import Writer

ROOT = 0
_UCRED = struct.Struct("3i")
_STATE, _THREADS, _START = 0, 17, 19
"""Places in /proc/PID/stat behind the name of the program."""


def process_lives(pid: int) -> bool:
    """Whether a process with this id runs, with at least one thread that can still write somewhere.

    A client in a process namespace of its own has an id of 0 here; what cannot be seen is taken to live.
    """
    return pid <= 0 or may_write(Writer(pid, pid_namespace=pid_namespace()))


def may_write(writer: Writer) -> bool:
    """Whether the process of ``writer`` may still be there; also where that cannot be known."""
    if not writer.pid or writer.pid_namespace != pid_namespace():
        return True
    fields = _stat(writer.pid)
    if fields is None:
        return _exists(writer.pid)
    return _runs(fields) and writer.start in (0, _start(fields))


def writer_at(pid: int, instance: bytes) -> Writer:
    if pid <= 0:
        return Writer(instance=instance)
    fields = _stat(pid)
    return Writer(pid, 0 if fields is None else _start(fields), instance, pid_namespace())


@functools.cache
def pid_namespace() -> int:
    """The number of the namespace that process ids are of here; 0 where the system does not say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino & 0xFFFFFFFF
    except OSError:
        return 0


def _stat(pid: int) -> list[str] | None:
    """What the system says of a process; None where it says nothing, which need not mean that there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()


def _runs(fields: list[str]) -> bool:
    # The state is that of the main thread; the others may go on without it, or be a moment behind when killed.
    return fields[_STATE] not in ("Z", "X") or int(fields[_THREADS]) > 1


def _start(fields: list[str]) -> int:
    return int(fields[_START]) & 0xFFFFFFFF


def _exists(pid: int) -> bool:
    """Whether there is such a process, where /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # It may have ended in between: what is this user's own is not hidden.
    return _stat(pid) is not None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other side, as the kernel says; the process is 0 if it cannot be seen from here."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def foreign_owner(path: Path) -> int | None:
    """The user other than this one and root who owns the socket ``path``, its folder, or a link in place of either.

    None where there is no such user, or where nothing can be reached.
    """
    for place in (path.parent, path):
        for follow in (False, True):
            try:
                owner = place.stat(follow_symlinks=follow).st_uid
            except OSError:
                return None
            if is_foreign(owner):
                return owner
    return None


def is_foreign(uid: int) -> bool:
    return uid not in (os.geteuid(), ROOT)


def stranger(path: Path, uid: int) -> Unauthorised:
    """Why a node at ``path`` that is, or seems to be, of the user ``uid`` is not used."""
    return Unauthorised(
        f"the node on {path} belongs to user {uid}, who could read and change what it holds, expected one of user "
        f"{os.geteuid()} or root, or the access key of a tenant whom it knows; run this as user {uid}, or name another "
        "socket"
    )
