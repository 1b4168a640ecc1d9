"""``ems stop``: stop the pool node of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ems.cli.options import Socket
from ems.config import default_socket
from ems.errors import PoolUnavailable
from ems.pool.client.pool_client import PoolClient
from ems.pool.processes import process_lives
from ems.pool.segments.folder import Folder

_POLL_SECONDS = 0.02


def stop(
    *,
    socket: Socket = None,
    timeout: float = 20.0,
    clear: bool = False,
) -> int:
    """Stop the pool node of this host: its engines serve on without it.

    Its pages stay in shared memory for the node that is started next in the same folder.

    Parameters
    ----------
    socket
        The node's Unix socket, default that of this user's node.
    timeout
        Seconds to wait for its end.
    clear
        Remove its pages from memory too, and give the memory back; what its tiers have stays there.
    """
    path = socket or default_socket()
    pid, directory, tiers = _peer(path)
    with contextlib.suppress(ProcessLookupError):  # it may end by itself in this very moment
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_lives(pid):
        if time.monotonic() >= deadline:
            print(f"error: the node (process {pid}) did not end within {timeout:.0f} s", file=sys.stderr)
            return 1
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    print(f"stopped the node on {path} (process {pid})", file=sys.stderr)
    if clear:
        _clear(directory)
        if tiers:
            names = " and ".join(tiers)
            print(f"what {names} has stays, 'ems clear --all' on a running node takes it out", file=sys.stderr)
    return 0


def _clear(directory: Path) -> None:
    """Remove the pages that a node left, unless another one has them by now."""
    if not directory.exists():
        return
    folder = Folder(directory)
    folder.remove_segments()
    folder.close(log=False)


def _peer(path: Path) -> tuple[int, Path, list[str]]:
    """The process that answers on ``path`` as a node, its folder and its tiers.

    Its own word and the kernel's must agree.
    """
    client = PoolClient(path, "ems stop", administers=True)
    try:
        figures: dict[str, Any] = client.stats()
        told, directory = figures["pid"], Path(str(figures.get("directory", "")))
        tiers = [str(tier["name"]) for tier in figures.get("tiers", ())]
        pid = client.node_pid
    finally:
        client.close()
    if pid != told:
        raise PoolUnavailable(f"the node on {path} runs in another process namespace, stop it there")
    return pid, directory, tiers
