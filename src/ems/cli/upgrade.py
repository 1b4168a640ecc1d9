"""``ems upgrade``: let the pool node become the installed release, under live load."""

from __future__ import annotations

import time
from typing import Any

from ems.cli.acts import connected
from ems.cli.options import ASKING, Asking, Seconds
from ems.cli.shown import note, print_json
from ems.errors import PoolRefused, PoolTimeout, PoolUnavailable
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol.acts import Upgrade

RESTART_SECONDS = 120.0
"""How long an upgrade may take; it takes two seconds, half of them a restart, unless the machine is very busy."""
_POLL_SECONDS = 0.05


def upgrade(*, timeout: Seconds = RESTART_SECONDS, asked: Asking = ASKING) -> None:
    """Let the pool node become the release that is installed now, in its own process.

    Pages, pins and settings stay. Clients wait for about a second and go on. If the installed release cannot start the
    node goes on as it is. SIGHUP to the node does the same.

    Parameters
    ----------
    timeout
        Seconds to wait until the node is back.
    """
    deadline = time.monotonic() + timeout
    with connected(asked.at) as client:
        before = client.stats(timeout)
        client.administer(Upgrade(), timeout=timeout)
        after = _back(client, str(before["node"]), deadline)
    note(f"the node on {asked.at} is EMS {after['release']}, was EMS {before['release']} (process {after['pid']})")
    if asked.json:
        was = {"pid": before["pid"], "release": before["release"]}
        print_json({"socket": str(asked.at), "pid": after["pid"], "release": after["release"], "before": was})


def _back(client: PoolClient, node: str, deadline: float) -> dict[str, Any]:
    """The figures of the node after its restart; ``node`` is its identity before."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            figures: dict[str, Any] = client.stats(left)
        except PoolTimeout:
            break
        if figures["node"] != node:
            return figures
        if not figures["restart"]["wished"]:
            raise PoolRefused(figures["restart"]["failure"])
        time.sleep(_POLL_SECONDS)  # bounded by the deadline of this loop
    raise PoolUnavailable("the node did not come back in time, see its log and `ems health`")
