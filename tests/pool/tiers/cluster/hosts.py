"""Two nodes on one Mooncake master, as two hosts have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess


def write_settings(folder: Path, master: str, **settings: object) -> Path:
    """A file as people have it; returns its path."""
    path = folder / "mooncake.json"
    said = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "use_ascend_direct": True,
        "master_server_address": master,
        "global_segment_size": "64MB",
        "local_buffer_size": "1GB",
        "local_hostname": "127.0.0.1",
        **settings,
    }
    path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))
    return path


def start_master(folder: Path, *flags: str) -> MooncakeMaster:
    """A master whose leases are over soon, so that what is removed is gone."""
    return MooncakeMaster(folder, "--default_kv_lease_ttl=1000", *flags)


def cluster(node: NodeProcess) -> dict[str, Any]:
    """The figures of the node's cluster tier."""
    figures = node.figures()["tiers"][0]
    assert isinstance(figures, dict)
    return figures
