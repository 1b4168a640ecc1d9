"""``ems stop``: stop the pool node of this host."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ems.config import default_socket
from ems.errors import PoolUnavailable
from ems.pool.client import PoolClient
from ems.pool.processes import process_lives

_UCRED = struct.Struct("3i")
_POLL_SECONDS = 0.02


def stop(
    *,
    socket: Annotated[Path | None, Parameter(env_var="EMS_SOCKET")] = None,
    timeout: float = 20.0,
) -> int:
    """Stop the pool node of this host: its engines serve on without it.

    Parameters
    ----------
    socket
        The node's Unix socket, default that of this user's node.
    timeout
        Seconds to wait for its end.
    """
    path = socket or default_socket()
    pid = _peer(path)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_lives(pid):
        if time.monotonic() >= deadline:
            print(f"error: the node (process {pid}) did not end within {timeout:.0f} s", file=sys.stderr)
            return 1
        time.sleep(_POLL_SECONDS)
    print(f"stopped the node on {path} (process {pid})", file=sys.stderr)
    return 0


def _peer(path: Path) -> int:
    """The process that answers on ``path`` as a node: its own word and the kernel's must agree."""
    client = PoolClient(path, "ems stop")
    try:
        told = client.stats()["pid"]
    finally:
        client.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(str(path))
        pid: int = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    if pid != told:
        raise PoolUnavailable(f"the node on {path} runs in another process namespace, stop it there")
    return pid
