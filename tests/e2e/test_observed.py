"""What an engine with the connector tells: metrics, explanations, log lines, KV events."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from ems.vllm.model import CHUNK_TOKENS
from tests.e2e.engines import BLOCK, OPTIONS, Node, connector, post, random_prompt, running, running_node, wait_for
from tests.kit.engine import VllmServer, free_port

pytestmark = pytest.mark.e2e


EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}


class Observed:
    def __init__(self, node: Node, server: VllmServer, subscriber: Any) -> None:
        self.node = node
        self.server = server
        self._subscriber = subscriber

    def events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Events that came since the last call, of blocks in host memory.

        vLLM sends events with its steps, so there is a short one first.
        """
        self.ask([301, 302])
        came: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        while self._subscriber.poll(200):
            _, _, payload = self._subscriber.recv_multipart()
            came += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return [event for event in came if getattr(event, "medium", "") == "CPU"]

    def ask(self, prompt: list[int], **params: object) -> dict[str, Any]:
        """The explanation of a request."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "kv_transfer_params": params}
        answer = post(self.server.url, "/v1/completions", body)
        return dict((answer.get("kv_transfer_params") or {}).get("ems_explain") or {})

    def store(self, prompt: list[int], **params: object) -> dict[str, Any]:
        """Ask with a new prompt, and wait until it is in the pool."""
        before = self.node.counters["pages_committed"]
        explanation = self.ask(prompt, **params)
        wait_for(lambda: self.node.counters["pages_committed"] > before, "the prompt is stored")
        self.node.wait_stored()
        return explanation

    def metric(self, name: str, label: str = "") -> float:
        """The value of a metric, added up over its samples with ``label``."""
        with urllib.request.urlopen(f"{self.server.url}/metrics") as answer:  # noqa: S310 - a server of our own
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


@pytest.fixture(scope="module")
def observed(model: Path, logs: Path) -> Iterator[Observed]:
    port = free_port()
    events = json.dumps({**EVENTS, "endpoint": f"tcp://*:{port}"})
    with running_node("--size", "16MB") as node:
        server = VllmServer(
            model,
            log=logs / "observed.log",
            kv_transfer_config=connector("kv_both"),
            options=msgspec.structs.replace(OPTIONS, arguments=("--kv-events-config", events)),
            environment=node.environment,
        )
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, running(server):
            subscriber.connect(f"tcp://127.0.0.1:{port}")
            subscriber.subscribe("")
            yield Observed(node, server, subscriber)


def test_a_request_that_asks_is_told_of_its_hit_and_of_its_miss(observed: Observed) -> None:
    prompt = random_prompt(1, 4 * BLOCK + 5)
    miss = observed.store(prompt, ems_explain=True)
    assert (miss["prompt"], miss["found"], miss["from_pool"], miss["reason"]) == (len(prompt), 0, 0, "never_stored")

    hit = observed.ask(prompt, ems_explain=True)
    assert (hit["found"], hit["from_pool"], hit["loaded_blocks"]) == (len(prompt), len(prompt), 5)
    assert (hit["computed"], hit["tier"], hit["reason"]) == (1, "DRAM", "nothing_missed")
    longer = observed.ask(prompt + random_prompt(2, BLOCK), ems_explain=True)
    assert (longer["from_pool"], longer["computed"], longer["reason"]) == (len(prompt), BLOCK, "never_stored")
    assert observed.ask(prompt) == {}
    assert "EMS explains request cmpl-" in observed.server.log.read_text()


def test_metrics_tell_loads_saves_lookups_and_where_tokens_came_from(observed: Observed) -> None:
    expected = {
        ("vllm:ems_load_seconds_count", ""): 1,
        ("vllm:ems_loaded_blocks_total", ""): 3,
        ("vllm:ems_lookups_total", ""): 2,
        ("vllm:ems_lookup_tokens_total", ""): 6 * BLOCK,
        ("vllm:ems_hit_tokens_total", ""): 3 * BLOCK,
        ("vllm:ems_misses_total", 'reason="never_stored"'): 1,
        ("vllm:prompt_tokens_cached_by_source_total", 'source="host"'): 3 * BLOCK,
    }

    def read() -> dict[tuple[str, str], float]:
        return {sample: observed.metric(*sample) for sample in expected}

    before = read()
    saved = observed.metric("vllm:ems_saved_blocks_total")
    prompt = random_prompt(3, 3 * BLOCK)
    observed.store(prompt)
    observed.ask(prompt)

    def shown() -> bool:
        return {sample: value - before[sample] for sample, value in read().items()} == expected

    wait_for(shown, "the metrics show the hit")
    assert observed.metric("vllm:ems_saved_blocks_total") - saved >= 3
    assert observed.metric("vllm:ems_saved_bytes_total") > 0
    assert observed.metric("vllm:ems_pool_usable") == 1


def test_every_30_seconds_one_line_sums_up(observed: Observed) -> None:
    observed.store(random_prompt(4, BLOCK))
    wait_for(lambda: "EMS: loads " in observed.server.log.read_text(), "the line is written", 45)
    line = next(line for line in observed.server.log.read_text().splitlines() if "EMS: loads " in line)

    assert "saves " in line
    assert "hit rate " in line


def test_events_follow_blocks_into_the_pool_and_out_of_it(observed: Observed) -> None:
    """Last in this file: the pool is filled until the first blocks leave."""
    blocks = CHUNK_TOKENS // BLOCK  # events tell of chunks that are full
    prompt = random_prompt(5, blocks * BLOCK)
    observed.store(prompt)
    stored: list[BlockStored] = []

    def announced() -> bool:
        stored.extend(event for event in observed.events() if isinstance(event, BlockStored))
        return any(event.token_ids[:BLOCK] == prompt[:BLOCK] for event in stored)

    wait_for(announced, "the prompt's blocks are announced", 60)
    event = next(event for event in stored if event.token_ids[:BLOCK] == prompt[:BLOCK])
    assert event.token_ids == prompt
    assert (len(event.block_hashes), event.block_size, event.parent_block_hash) == (blocks, BLOCK, None)

    removed: set[object] = set()

    def taken_back() -> bool:
        observed.ask(random_prompt(next(seeds), 2040))
        for seen in observed.events():
            removed.update(seen.block_hashes if isinstance(seen, BlockRemoved) else ())
        return set(event.block_hashes) <= removed

    seeds = iter(range(1000, 2000))
    wait_for(taken_back, "the prompt's blocks are taken back", 200)
