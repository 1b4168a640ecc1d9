"""What is written down in a node's audit log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ems.pool.node.audit import Act


def acts_in(path: Path) -> list[Act]:
    """The acts in one file of the log, the oldest first."""
    return [msgspec.json.decode(line, type=Act) for line in path.read_bytes().splitlines()]
