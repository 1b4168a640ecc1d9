"""Engines of several data-parallel replicas on one pool.

Pipeline stages are left to unit tests: vLLM 0.32 fails on a CPU when the second stage of an eager engine computes,
because what it computes in is made while warming up, which an eager engine on a CPU does not do.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engines import OPTIONS, Prompt, Reference, connector, random_prompt, running_node, wait_for
from tests.kit.engine import VllmServer
from tests.kit.prepared import PreparedServer

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]

PROMPTS = [random_prompt(800 + number, 200 + 111 * number) for number in range(4)]


def external_hits(server: VllmServer) -> float:
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def complete_on(server: VllmServer, replica: int, prompt: Prompt) -> str:
    """The greedy continuation of ``prompt`` that one replica of several computes."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - a server of our own
        return str(json.load(answer)["choices"][0]["text"])


def test_what_one_replica_stored_serves_the_other(model: Path, logs: Path, reference: Reference) -> None:
    options = msgspec.structs.replace(
        OPTIONS, prefix_caching=True, gpu_blocks=300, arguments=("--data-parallel-size", "2")
    )
    with running_node("--size", "256MB") as node:
        server = PreparedServer(
            model,
            log=logs / "replicas.log",
            kv_transfer_config=connector("kv_both"),
            options=options,
            environment=node.environment,
        )
        with server:
            for prompt in PROMPTS:
                assert complete_on(server, 0, prompt) == reference.text(prompt)
            node.wait_stored()
            assert external_hits(server) == 0
            for prompt in PROMPTS:
                assert complete_on(server, 1, prompt) == reference.text(prompt)
            assert external_hits(server) >= sum(len(prompt) - 1 for prompt in PROMPTS)
            wait_for(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0, "the engine has its blocks back")
            wait_for(lambda: node.stats()["leases"] == 0, "nothing is promised")
