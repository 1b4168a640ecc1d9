"""Engines of a node with tenants: one that has a key, one of another tenant, one without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import (
    BLOCK,
    OPTIONS,
    Node,
    Reference,
    complete_all,
    connector,
    pool_directory,
    random_prompt,
    running,
)
from tests.kit.engine import VllmServer
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

PROMPTS = [random_prompt(700 + number, 5 * BLOCK + number) for number in range(4)]
TOKENS = float(sum(map(len, PROMPTS)))


def ems(*words: str | Path) -> str:
    command = [sys.executable, "-m", "ems.cli", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


class Engines:
    def __init__(self, node: Node, acme: VllmServer, umbra: VllmServer, stranger: VllmServer, log: Path) -> None:
        self.node = node
        self.acme = acme
        self.umbra = umbra
        self.stranger = stranger
        self.stranger_log = log


def hits(engine: VllmServer) -> float:
    """Tokens that came from the pool."""
    return engine.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


@pytest.fixture(scope="module")
def engines(model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.json"
    with pool_directory() as directory:
        flags = ("--tenants", tenants)
        keys = {}
        for name in ("acme", "umbra"):
            ems("tenant", "add", name, *flags)
            keys[name] = ems("key", "add", name, *flags)
        node = Node(directory, "--size", "256MB", "--tenants", str(tenants))
        node.start()

        def engine(name: str, key: str) -> VllmServer:
            return PreparedServer(
                model,
                log=logs / f"tenants-{name}.log",
                kv_transfer_config=connector("kv_both"),
                options=OPTIONS,
                environment={**node.environment, "ACCELERATE_ID": name, "ACCELERATE_KEY": key},
            )

        acme, umbra = engine("acme", keys["acme"]), engine("umbra", keys["umbra"])
        stranger = engine("stranger", keys["acme"])
        try:
            with running(acme, umbra, stranger):
                yield Engines(node, acme, umbra, stranger, logs / "tenants-stranger.log")
        finally:
            node.stop()


def test_each_tenant_has_a_pool_of_its_own(engines: Engines, reference: Reference) -> None:
    texts = reference.texts(PROMPTS)

    assert complete_all(engines.acme.url, PROMPTS) == texts
    engines.node.wait_stored()
    assert complete_all(engines.umbra.url, PROMPTS) == texts
    assert hits(engines.umbra) == 0

    assert complete_all(engines.acme.url, PROMPTS) == texts
    assert hits(engines.acme) == TOKENS


def test_an_engine_without_a_key_serves_without_the_pool_and_says_why(engines: Engines, reference: Reference) -> None:
    texts = reference.texts(PROMPTS)

    assert complete_all(engines.stranger.url, PROMPTS) == texts
    assert complete_all(engines.stranger.url, PROMPTS) == texts

    assert hits(engines.stranger) == 0
    assert "does not accept these credentials" in engines.stranger_log.read_text()
