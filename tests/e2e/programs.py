"""Programs that have engines of their own and print what they saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.kit.engine import ENVIRONMENT
from tests.kit.prepared import PreparedProgram, vllm_parent

SECONDS = 900
"""For a program that starts a few engines, on a machine that has other things to do."""


def seen_by(module: str, *arguments: str | Path, log: Path) -> dict[str, Any]:
    """The line of JSON that the program prints; vLLM writes its log there too."""
    with log.open("wb") as output:
        words, environment = [str(argument) for argument in arguments], {**os.environ, **ENVIRONMENT}
        program = PreparedProgram(module, words, output=output, environment=environment, parent=vllm_parent())
        try:
            assert program.wait(SECONDS) == 0
        finally:
            program.terminate()
            program.wait()
    (seen,) = [line for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    return dict(json.loads(seen))
