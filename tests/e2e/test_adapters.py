"""Engines that compute with LoRA adapters share pages of equal weights, and of no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engines import running_node

pytestmark = pytest.mark.e2e

SECONDS = 900
"""For a program that starts three engines, on a machine that has other things to do."""


def test_adapters_are_shared_by_their_weights_alone(model: Path, logs: Path, tmp_path: Path) -> None:
    with running_node("--size", "256MB") as node, (logs / "adapters.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.e2e.adapter_engine", str(model), str(tmp_path), str(node.socket)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=SECONDS, check=True)
    # VLLM writes its log there too.
    (seen,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    first, second = seen["first"], seen["second"]
    assert first != second
    assert seen["stored"] == [first, 0]
    for name in ("found again", "under another name"):
        answers, hits = seen[name]
        assert (answers, hits > 0) == (first, True), name
    assert seen["others under the same name"] == [second, 0]
    answers, hits = seen["reloaded in place"]
    assert (answers, hits > 0) == (second, True), "what was stored under a name and from a folder of its own"
