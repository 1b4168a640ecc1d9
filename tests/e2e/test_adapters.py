"""Engines that compute with LoRA adapters share pages of equal weights, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.engines import running_node
from tests.e2e.programs import seen_by

pytestmark = pytest.mark.e2e


def test_adapters_are_shared_by_their_weights_alone(model: Path, logs: Path, tmp_path: Path) -> None:
    with running_node("--size", "256MB") as node:
        seen = seen_by("tests.e2e.adapter_engine", model, tmp_path, node.socket, log=logs / "adapters.log")
    first, second = seen["first"], seen["second"]
    assert first != second
    assert seen["stored"] == [first, 0]
    for name in ("found again", "under another name"):
        answers, hits = seen[name]
        assert (answers, hits > 0) == (first, True), name
    assert seen["others under the same name"] == [second, 0]
    answers, hits = seen["reloaded in place"]
    assert (answers, hits > 0) == (second, True), "what was stored under a name and from a folder of its own"
