"""``ems health``: what is well with the node and what is not."""

from __future__ import annotations

import msgspec

from ems.cli.options import ASKING, Asking
from ems.cli.shown import print_json, print_table
from ems.config import default_socket
from ems.pool.administration.health import judge
from ems.pool.client.pool_client import PoolClient


def health(*, asked: Asking = ASKING) -> int:
    """Say what is well with the node and what is not; exit status 1 when something is not."""
    client = PoolClient(asked.socket or default_socket(), "ems health", administers=True)
    try:
        checks = judge(client.stats())
    finally:
        client.close()
    well = all(check.well for check in checks)
    if asked.json:
        print_json({"well": well, "checks": msgspec.to_builtins(checks)})
    else:
        print_table(
            ("CHECK", "", "SEEN"), [(check.name, "well" if check.well else "ILL", check.seen) for check in checks]
        )
    return 0 if well else 1
