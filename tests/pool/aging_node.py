"""``python -m tests.pool.aging_node``: the ``ems`` command with a node whose time goes by as a test says.

The file that ``TEST_NODE_AGE`` names has the seconds that its clock is ahead of the host's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ems.cli.node
from ems.cli import main
from ems.pool.node import pool_node
from ems.pool.node.pool_node import Node

AGE = "TEST_NODE_AGE"


def clock() -> float:
    """The host's clock, ahead by what the file says."""
    try:
        return time.monotonic() + float(Path(os.environ[AGE]).read_text(encoding="ascii") or 0)
    except FileNotFoundError:
        return time.monotonic()


class AgingNode(Node):
    """Looks around often, and counts how often it did."""

    def __init__(self, config: Any, kept: Any = None) -> None:
        self._ticks = 0
        super().__init__(config, clock, kept=kept)

    def _tick(self) -> None:
        super()._tick()
        self._ticks += 1

    def figures(self) -> dict[str, object]:
        """With the count of ticks."""
        return {**super().figures(), "ticks": self._ticks}


setattr(ems.cli.node, "Node", AgingNode)  # noqa: B010 - nobody exports it from there
pool_node.TICK_SECONDS = 0.02

if __name__ == "__main__":
    main()
