"""``ems stop``: stop the pool node of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ems.config import default_socket
from ems.errors import PoolUnavailable
from ems.pool.client import PoolClient
from ems.pool.processes import process_lives

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
    with contextlib.suppress(ProcessLookupError):  # it may end by itself in this very moment
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_lives(pid):
        if time.monotonic() >= deadline:
            print(f"error: the node (process {pid}) did not end within {timeout:.0f} s", file=sys.stderr)
            return 1
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    print(f"stopped the node on {path} (process {pid})", file=sys.stderr)
    return 0


def _peer(path: Path) -> int:
    """The process that answers on ``path`` as a node: its own word and the kernel's must agree."""
    client = PoolClient(path, "ems stop")
    try:
        told = client.stats()["pid"]
        pid = client.node_pid
    finally:
        client.close()
    if pid != told:
        raise PoolUnavailable(f"the node on {path} runs in another process namespace, stop it there")
    return pid
