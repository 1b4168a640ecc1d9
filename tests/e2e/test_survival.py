"""Two engines whose node is upgraded or killed under them: no request fails, and what was stored is still a hit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.engines import (
    BLOCK,
    OPTIONS,
    Node,
    Prompt,
    Reference,
    complete,
    complete_all,
    connector,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.kit.engine import VllmServer
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

UPGRADES = 5
PROMPTS = [random_prompt(500 + number, 6 * BLOCK + number) for number in range(8)]


class Pair:
    """Two engines without a prefix cache of their own: every hit is one of the pool."""

    def __init__(self, node: Node, engines: tuple[VllmServer, VllmServer]) -> None:
        self.node = node
        self.engines = engines

    def hits(self) -> float:
        """Tokens that came from the pool until now."""
        return sum(engine.metrics().get("vllm:external_prefix_cache_hits_total", 0.0) for engine in self.engines)

    def ask_all(self) -> list[str]:
        """Each prompt once of each engine."""
        return [text for engine in self.engines for text in complete_all(engine.url, PROMPTS)]

    def hits_of_a_round(self) -> float:
        before = self.hits()
        self.ask_all()
        return self.hits() - before


@pytest.fixture(scope="module")
def pair(model: Path, logs: Path) -> Iterator[Pair]:
    with running_node("--size", "256MB") as node:
        first, second = (
            PreparedServer(
                model,
                log=logs / f"survival-{number}.log",
                kv_transfer_config=connector("kv_both"),
                options=OPTIONS,
                environment=node.environment,
            )
            for number in range(2)
        )
        with running(first, second):
            yield Pair(node, (first, second))


@pytest.fixture(scope="module")
def expected(pair: Pair, reference: Reference) -> list[str]:
    """What the engines must answer; the prompts are stored from then on."""
    texts = reference.texts(PROMPTS)
    assert pair.ask_all() == texts * 2
    pair.node.wait_stored()
    return texts * 2


WHOLE = 2.0 * sum(map(len, PROMPTS))
"""Tokens of one round, all of them from the pool."""


@contextmanager
def load(pair: Pair, answers: list[tuple[Prompt, str]]) -> Iterator[None]:
    """Both engines are asked without a pause, until the block ends."""
    over = threading.Event()

    def ask(engine: VllmServer, number: int) -> None:
        while not over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            answers.append((prompt, complete(engine.url, prompt)))
            number += 1

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, engine, number) for engine in pair.engines for number in (0, 4)]
        try:
            yield
        finally:
            over.set()
        for one in asked:
            one.result()


def test_a_node_that_is_upgraded_under_load_fails_no_request_and_loses_hardly_a_hit(
    pair: Pair, reference: Reference, expected: list[str]
) -> None:
    before, hits = pair.node.stats(), pair.hits()
    answers: list[tuple[Prompt, str]] = []

    with load(pair, answers):
        for _ in range(UPGRADES):
            asked = len(answers)
            wait_for(lambda: len(answers) >= asked + 8, "requests between two upgrades")  # noqa: B023 - called at once
            command = [sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(pair.node.socket)]
            subprocess.run(command, check=True, timeout=180)

    after = pair.node.stats()
    assert after["pid"] == before["pid"]
    assert after["node"] != before["node"]
    assert [text for _, text in answers] == [reference.text(prompt) for prompt, _ in answers]
    assert pair.hits() - hits > 0.99 * sum(len(prompt) for prompt, _ in answers)


def test_a_node_that_is_killed_comes_back_with_every_page(pair: Pair, expected: list[str]) -> None:
    assert pair.hits_of_a_round() == WHOLE
    pid = pair.node.stats()["pid"]

    pair.node.kill_serving(pid)
    assert pair.ask_all() == expected  # without the pool
    pair.node.start()

    assert pair.node.stats()["pid"] != pid
    wait_for(lambda: pair.hits_of_a_round() == WHOLE, "the engines use the pool again")
    assert pair.ask_all() == expected
