"""Engines whose weights change: a reset never fails for what is still being saved, and nothing of before is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import Node, running_node
from tests.e2e.programs import seen_by
from tests.kit.tiny_model import make_model

pytestmark = pytest.mark.e2e

RunEngine = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--size", "256MB") as running:
        yield running


@pytest.fixture(scope="module")
def run(model: Path, logs: Path, node: Node) -> RunEngine:
    other = make_model(model.parent / "other", "test", seed=1)

    def run(mode: str) -> dict[str, Any]:
        log = logs / f"reset-{mode.replace(' ', '-')}.log"
        return seen_by("tests.e2e.reset_engine", mode, model, other, node.socket, log=log)

    return run


@pytest.fixture(scope="module")
def right(run: RunEngine) -> list[list[int]]:
    """What an engine without a connector answers with the new weights."""
    return list(run("bare")["answers"])


@pytest.mark.parametrize("mode", ["in process", "apart"])
def test_a_reset_right_after_an_answer_succeeds_and_nothing_of_before_is_used(
    run: RunEngine, right: list[list[int]], mode: str
) -> None:
    seen = run(mode)
    assert all(seen["resets"]), seen["resets"]
    assert seen["answers"] == right


def test_engines_share_what_new_weights_computed_once_these_have_a_name(run: RunEngine, right: list[list[int]]) -> None:
    seen = run("pair")
    assert all(seen["resets"])
    assert all(given == right for given in seen["answers"])
    assert seen["hits before a version was declared"] == 0
    assert seen["hits afterwards"] > 0
