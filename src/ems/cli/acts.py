"""What the verbs that administer a node have in common: one act, and its report once it is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ems.config import default_socket
from ems.errors import PoolTimeout
from ems.pool.administration.acts import Acts, Follow
from ems.pool.client.pool_client import PoolClient

_POLL_SECONDS = 0.05
PATIENCE = 120.0
"""Seconds that a verb waits for progress of what it began."""


def ask(socket: Path | None, act: Acts, *, dry_run: bool = False, timeout: float = PATIENCE) -> dict[str, Any]:
    """The report of ``act``, once it is done.

    Raises:
        PoolError: the node refused, or got no further for ``timeout`` seconds; what it began goes on.
    """
    client = PoolClient(socket or default_socket(), "ems", administers=True)
    try:
        report = client.administer(act, dry_run=dry_run)
        deadline = time.monotonic() + timeout
        while not report.get("done", True):
            if time.monotonic() >= deadline:
                raise PoolTimeout(f"the node got no further for {timeout:.0f} s and goes on (job {report['job']})")
            time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
            before, report = report, {**report, **client.administer(Follow(report["job"]))}
            if report != before:
                deadline = time.monotonic() + timeout
        return report
    finally:
        client.close()
