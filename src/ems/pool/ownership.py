"""Whose a node is, before anything is sent to it or believed of it.

A folder in shared memory can be made by anybody who is first, and a socket in it answers like a node.  What always
holds: a place counts as this user's only if its folder, its socket and the process behind that belong to this user or
to root, whoever links lead there by.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from ems.errors import Unauthorised

ROOT = 0
_UCRED = struct.Struct("3i")


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
