"""``python -m tests.pool.dying_node``: the ``ems`` command with a node that kills itself at a moment of one's choice.

``TEST_NODE_DIES_AT`` counts moments from the first request on: before and after each write to a segment or file, before
a request is looked at, when it was done and not yet answered, when it was answered.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import ems.cli.node
from ems.cli import main
from ems.pool.node.connection import AnswerSteps
from ems.pool.protocol import messages
from tests.faults.points import CrashingNode, Points

MOMENT = "TEST_NODE_DIES_AT"


class Deadly(Points):
    """Ends the process itself."""

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingNode(CrashingNode):
    """Counts from its first request on."""

    def __init__(self, config: Any, kept: Any = None) -> None:
        from time import monotonic

        super().__init__(config, monotonic, Deadly(), kept)
        self._armed = False

    def _reach(self, kind: str) -> None:
        self._points.write(kind, b"", lambda _: None)

    def answer(self, client_id: int, request: messages.Request) -> messages.Answer | AnswerSteps | None:
        if not self._armed:
            self._armed = True
            self._points.arm(int(os.environ.get(MOMENT, "-1")), 0.5)
        self._reach("request")
        answer = super().answer(client_id, request)
        self._reach("done")
        return answer

    def answered(self) -> None:
        if self._armed:
            self._reach("answered")
        super().answered()


setattr(ems.cli.node, "Node", DyingNode)  # noqa: B010 - nobody exports it from there

if __name__ == "__main__":
    main()
