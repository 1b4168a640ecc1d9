"""vLLM's own ``OffloadingConnector`` over the pool: what one engine stored another loads, with the right texts."""

from __future__ import annotations

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
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.tiny_model import Size, make_model

pytestmark = pytest.mark.e2e

MODELS: dict[Size, EngineOptions] = {
    "test": OPTIONS,
    "hybrid": OPTIONS,
    "mla": msgspec.structs.replace(
        OPTIONS, block_size=16, dtype="float32", arguments=("--attention-backend", "CPU_MLA")
    ),
}
CHUNK = 64
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {
        "spec_name": "EmsOffloadingSpec",
        "spec_module_path": "ems.vllm.offloading",
        "block_size": CHUNK,
        **PATIENT,
    },
}
HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "256MB") as running_one:
        yield running_one


@pytest.mark.parametrize("size", list(MODELS))
def test_another_engine_loads_what_one_stored(size: Size, logs: Path, node: Node) -> None:
    model, options = make_model(logs / f"offloading-{size}", size), MODELS[size]

    def server(name: str, **transfer: object) -> VllmServer:
        log = logs / f"offloading-{size}-{name}.log"
        return VllmServer(
            model, log=log, options=options, environment=node.environment, kv_transfer_config=transfer or None
        )

    plain, one, two = server("plain"), server("one", **OFFLOADING), server("two", **OFFLOADING)
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
        if size != "hybrid":  # of a window only the last chunks of a prompt are stored
            assert two.metrics().get(HITS, 0.0) == loaded + 3 * 512

        node.kill()
        more = [*prompts, *(random_prompt(300 + number, 700) for number in range(2))]
        assert complete_all(two.url, more) == reference.texts(more)
        node.start()

        def hit_again() -> bool:
            before = one.metrics().get(HITS, 0.0)
            assert complete(one.url, prompts[1]) == reference.text(prompts[1])
            return bool(one.metrics().get(HITS, 0.0) > before)

        wait_for(hit_again, "pages are loaded from the node that is back")
        wait_for(lambda: not node.stats()["leases"], "nothing is held")
    assert node.counters["pages_corrupt"] == 0
