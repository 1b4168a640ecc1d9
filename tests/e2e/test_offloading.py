"""vLLM's own ``OffloadingConnector`` over the pool: what one engine stored another loads, with the right texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engines import (
    OPTIONS,
    PATIENT,
    Node,
    Reference,
    complete,
    complete_all,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.layouts import TWO_RANKS
from tests.e2e.pages import stored_pages
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.tiny_model import Size, make_model

pytestmark = pytest.mark.e2e

MODELS: dict[Size, EngineOptions] = {
    "test": OPTIONS,
    "hybrid": OPTIONS,
    "mla": msgspec.structs.replace(
        OPTIONS, block_size=16, dtype="float32", arguments=("--attention-backend", "CPU_MLA")
    ),
    # vLLM hands out a state where a prompt ends, and every so many tokens; without prefix caching none at all.
    "ssm": msgspec.structs.replace(
        OPTIONS, block_size=64, prefix_caching=True, arguments=("--prefix-cache-retention-interval", "256")
    ),
}
CHUNK = 64


def offloading(**extra: object) -> dict[str, object]:
    """What one writes after ``--kv-transfer-config``."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "spec_name": "EmsOffloadingSpec",
            "spec_module_path": "ems.vllm.offloading",
            **PATIENT,
            **extra,
        },
    }


HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture
def node() -> Iterator[Node]:
    # Each group of each rank has segments of its own.
    with running_node("--size", "1GB") as running_one:
        yield running_one


@pytest.mark.parametrize("size", list(MODELS))
def test_another_engine_loads_what_one_stored(size: Size, logs: Path, node: Node) -> None:
    model, options = make_model(logs / f"offloading-{size}", size), MODELS[size]

    def server(name: str, **transfer: object) -> VllmServer:
        log = logs / f"offloading-{size}-{name}.log"
        return VllmServer(
            model, log=log, options=options, environment=node.environment, kv_transfer_config=transfer or None
        )

    # With states a chunk is one block unless somebody says otherwise.
    transfer = offloading() if size == "ssm" else offloading(block_size=CHUNK)
    plain, one, two = server("plain"), server("one", **transfer), server("two", **transfer)
    prompts = [random_prompt(100 + number, 900 + 37 * number) for number in range(4)]
    shared = [prompts[0][:512] + random_prompt(200 + number, 100) for number in range(3)]
    with running(plain, one, two):
        reference = Reference(plain.url)
        assert complete_all(one.url, prompts) == reference.texts(prompts)
        node.wait_stored()
        assert one.metrics().get(HITS, 0.0) == 0

        assert complete_all(two.url, prompts) == reference.texts(prompts)
        assert (
            two.metrics().get(HITS, 0.0)
            >= sum(len(prompt) // CHUNK * CHUNK for prompt in prompts) - len(prompts) * CHUNK
        )

        loaded = two.metrics().get(HITS, 0.0)
        assert complete_all(two.url, shared) == reference.texts(shared)
        if options.prefix_caching:  # what one of them loaded the others find in the engine
            assert two.metrics().get(HITS, 0.0) >= loaded + 512
        elif size != "hybrid":  # of a window only the last chunks of a prompt are stored
            assert two.metrics().get(HITS, 0.0) == loaded + 3 * 512

        sound, broken = set(stored_pages(node.directory)), random_prompt(250, 500)
        assert complete(one.url, broken) == reference.text(broken)
        node.wait_stored()
        for page in set(stored_pages(node.directory)) - sound:
            page.overwrite()
        assert complete(two.url, broken) == reference.text(broken)
        assert "EMS cannot move chunks" in two.log.read_text()

        node.kill()
        more = [*prompts, *(random_prompt(300 + number, 700) for number in range(2))]
        assert complete_all(two.url, more) == reference.texts(more)
        node.start()
        seeds = itertools.count(400)

        def hit_again() -> bool:
            prompt = prompts[1]
            if options.prefix_caching:  # what it asked for once it keeps itself
                prompt = random_prompt(next(seeds), 200)
                assert complete(two.url, prompt) == reference.text(prompt)
                node.wait_stored()
            before = one.metrics().get(HITS, 0.0)
            assert complete(one.url, prompt) == reference.text(prompt)
            return bool(one.metrics().get(HITS, 0.0) > before)

        wait_for(hit_again, "pages are loaded from the node that is back")
        wait_for(lambda: not node.stats()["leases"], "nothing is held")
    assert node.counters["pages_corrupt"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize("size", ["test", "mla", "ssm"])
def test_engines_of_two_ranks_share_what_each_rank_stored(size: Size, logs: Path, node: Node) -> None:
    model, options = make_model(logs / f"ranks-{size}", size), MODELS[size]
    two_ranks = msgspec.structs.replace(options, arguments=(*options.arguments, *TWO_RANKS))
    transfer = offloading() if size == "ssm" else offloading(block_size=CHUNK)

    def server(name: str) -> VllmServer:
        return VllmServer(
            model,
            log=logs / f"ranks-{size}-{name}.log",
            options=two_ranks,
            environment=node.environment,
            kv_transfer_config=transfer,
        )

    prompts = [random_prompt(100 + number, 500 + 37 * number) for number in range(4)]
    with VllmServer(model, log=logs / f"ranks-{size}-plain.log", options=options) as plain:
        expected = complete_all(plain.url, prompts)
    with server("one") as one:
        assert complete_all(one.url, prompts) == expected
        node.wait_stored()
    with server("two") as two:
        assert complete_all(two.url, prompts) == expected
        assert two.metrics().get(HITS, 0.0) >= sum(len(prompt) // CHUNK * CHUNK for prompt in prompts)
        wait_for(lambda: not node.stats()["leases"], "nothing is held")
    assert node.counters["pages_corrupt"] == 0
