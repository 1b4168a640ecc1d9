"""``ems upgrade``: let a new process of the installed release take the place of the pool node's, under live load."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from ems.cli.options import Socket
from ems.config import default_socket
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import START_SECONDS, start_successor


def upgrade(
    *,
    socket: Socket = None,
    timeout: float = START_SECONDS,
) -> int:
    """Let a new process of the installed release take the place of the pool node's.

    Pages, clients, leases and settings stay; clients do not notice. If the new process cannot take over, the old one
    goes on as if nothing had been. SIGHUP to the node does the same.

    Parameters
    ----------
    socket
        The node's Unix socket, default that of this user's node.
    timeout
        Seconds to wait for the new process.
    """
    path = socket or default_socket()
    before = _figures(path)
    with tempfile.TemporaryFile() as log:
        pid = start_successor(path, log, timeout)
    after = _figures(path)
    print(
        f"the node on {path} is process {pid} with EMS {after['release']}, was process {before['pid']} with EMS "
        f"{before['release']}",
        file=sys.stderr,
    )
    return 0


def _figures(path: Path) -> dict[str, Any]:
    client = PoolClient(path, "ems upgrade", administers=True)
    try:
        return client.stats()
    finally:
        client.close()
