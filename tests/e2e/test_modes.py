"""Other ways to run: layer by layer, loads inside a step, other types of KV, drafted tokens."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from ems.vllm.model import CHUNK_TOKENS
from tests.e2e.engines import OPTIONS, Node, Reference, complete, complete_all, connector, random_prompt, running_node
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
PROMPTS = [random_prompt(700 + number, 300 + 57 * number) for number in range(3)]


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "256MB") as running:
        yield running


def eight_bits() -> str:
    """The KV type of eight bits where vLLM's CPU build has one, which is with AVX-512 or AMX; else the model's own."""
    return "fp8" if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported() else "auto"


@pytest.mark.parametrize("overlap", [True, False], ids=["steps-overlap", "step-by-step"])
def test_layer_by_layer_with_eight_bit_values(model: Path, logs: Path, node: Node, *, overlap: bool) -> None:
    """Where steps overlap, saves are made layer by layer, and loads between steps."""
    arguments = ("--kv-cache-dtype", eight_bits())
    options = msgspec.structs.replace(OPTIONS, async_scheduling=overlap, arguments=arguments)
    config = connector("kv_both", use_layerwise=True, load_async=None)
    with PreparedServer(
        model,
        log=logs / f"layerwise-{overlap}.log",
        options=options,
        kv_transfer_config=config,
        environment=node.environment,
    ) as server:
        cold = [complete(server.url, prompt) for prompt in PROMPTS]
        before = node.counters["keys_hit"]
        assert complete_all(server.url, PROMPTS * 2) == cold * 2
        assert node.counters["keys_hit"] - before >= 2 * sum(len(prompt) // CHUNK_TOKENS for prompt in PROMPTS)
        assert node.stats()["leases"] == 0


def test_loads_inside_a_step_with_drafted_tokens(model: Path, logs: Path, node: Node, reference: Reference) -> None:
    """VLLM has steps overlap with no drafts of this kind."""
    options = msgspec.structs.replace(OPTIONS, prefix_caching=True, arguments=("--speculative-config", DRAFTS))
    config = connector("kv_both", load_async=False)
    with PreparedServer(
        model,
        log=logs / "drafts.log",
        options=options,
        kv_transfer_config=config,
        environment={**node.environment, "VLLM_SERVER_DEV_MODE": "1"},
    ) as server:
        assert complete_all(server.url, PROMPTS) == reference.texts(PROMPTS)
        empty_cache = urllib.request.Request(server.url + "/reset_prefix_cache", b"")  # noqa: S310 - a server of our own
        urllib.request.urlopen(empty_cache, timeout=30).close()  # noqa: S310
        before = node.counters["keys_hit"]
        assert complete_all(server.url, PROMPTS) == reference.texts(PROMPTS)
        assert node.counters["keys_hit"] > before
        assert node.stats()["leases"] == 0
