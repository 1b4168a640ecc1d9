"""What an engine with the connector tells: metrics, explanations, log lines, KV events."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol.acts import Clear
from ems.vllm.model import CHUNK_TOKENS
from tests.e2e.engines import (
    BLOCK,
    OPTIONS,
    Node,
    complete,
    connector,
    post,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.routed_worker import SAYS, RoutedWorker, needs_router, vllm_router
from tests.kit.engine import VllmServer, free_port
from tests.kit.prepared import PreparedServer
from tests.kit.process import ServerProcess

pytestmark = pytest.mark.e2e


EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}
END = (-1).to_bytes(8, "big", signed=True)
"""The number of what comes last in a replay."""


class Observed:
    def __init__(self, node: Node, server: VllmServer, subscriber: Any, endpoints: tuple[str, str]) -> None:
        self.node = node
        self.server = server
        self.endpoint, self.replay_endpoint = endpoints
        self.heard: list[tuple[int, bytes]] = []
        """All batches that came, with their numbers."""
        self._subscriber = subscriber

    def events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Events that came since the last call, of blocks in host memory."""
        came: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        while self._subscriber.poll(200):
            _, number, payload = self._subscriber.recv_multipart()
            self.heard.append((int.from_bytes(number, "big"), payload))
            came += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return [event for event in came if getattr(event, "medium", "") == "CPU"]

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """The batches from number ``start`` on, as vLLM's publisher sends them to who missed them."""
        came: list[tuple[int, bytes]] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while dealer.poll(30_000):
                *_, number, payload = dealer.recv_multipart()
                if number == END:
                    return came
                came.append((int.from_bytes(number, "big"), payload))
        pytest.fail("the replay does not end")

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
    port, replay = free_port(), free_port()
    events = json.dumps({**EVENTS, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"})
    with running_node("--size", "32MB") as node:
        server = PreparedServer(
            model,
            log=logs / "observed.log",
            kv_transfer_config=connector("kv_both"),
            options=msgspec.structs.replace(OPTIONS, arguments=("--kv-events-config", events)),
            environment=node.environment,
        )
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, running(server):
            endpoints = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}"
            subscriber.connect(endpoints[0])
            subscriber.subscribe("")
            yield Observed(node, server, subscriber, endpoints)


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


@needs_router
def test_a_router_of_somebody_else_goes_by_what_the_pool_has(observed: Observed, logs: Path) -> None:
    """The other worker has a block of each prompt: it gets what the router believes the pool to have lost.

    The engine makes no step before it is cleared of a prompt, so all that the router knows comes from an idle engine.
    """
    prompts = [random_prompt(seed, CHUNK_TOKENS) for seed in range(20, 30)]
    firsts = {tuple(prompt[:BLOCK]) for prompt in prompts}
    there: set[object] = set()

    def announced() -> bool:
        for event in observed.events():
            if isinstance(event, BlockStored) and tuple(event.token_ids[:BLOCK]) in firsts:
                firsts.discard(tuple(event.token_ids[:BLOCK]))
                there.update(event.block_hashes)
        return not firsts

    def taken_back() -> bool:
        for event in observed.events():
            there.difference_update(event.block_hashes if isinstance(event, BlockRemoved) else ())
        return not there

    sources = {observed.server.url: observed.endpoint}
    with RoutedWorker() as other, vllm_router(sources | {other.url: other.events}, logs / "vllm-router.log") as url:
        for prompt in prompts:
            other.announce(prompt, "CPU", 1)
            observed.store(prompt)
        wait_for(announced, "the prompts' blocks are announced")
        wait_for(lambda: complete(url, prompts[0]) != SAYS, "the router gives a prompt to the engine")
        assert complete(url, prompts[1]) != SAYS

        administrator = PoolClient(observed.node.socket, "test", administers=True)
        administrator.administer(Clear(everything=True))
        administrator.close()
        wait_for(taken_back, "the prompts' blocks are taken back")
        # The router hears of it by another connection.  What it still gives to the engine is in the pool again.
        left = iter(prompts[2:])
        wait_for(lambda: complete(url, next(left)) == SAYS, "the router gives a prompt to the other worker")


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - a server of our own
        return json.load(answer)


@contextmanager
def own_router(observed: Observed, log: Path) -> Iterator[str]:
    """The address of a router that knows the engine by two names, and hears what the first one publishes."""
    port, there = free_port(), str(observed.server.port)
    source = f"127.0.0.1:{there}={observed.endpoint},{observed.replay_endpoint}"
    command = [sys.executable, "-m", "ems.cli", "router", "--port", str(port), "--tokenize-within", "60"]
    command += ["--decoder-hosts", "127.0.0.1", "localhost", "--decoder-ports", there, there, "--kv-events", source]
    with ServerProcess(command, name="router", port=port, log=log) as router:
        yield router.url


@pytest.mark.parametrize("seed", [40, 50], ids=["text", "chat"])
def test_a_text_is_found_by_the_tokens_of_events(observed: Observed, logs: Path, seed: int) -> None:
    """What the router asks an engine for are the tokens that it computes: others would match nothing."""

    def ask(url: str, number: int) -> list[int]:
        text = " ".join(map(str, random_prompt(seed + number, 250)))
        body: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True}
        if seed == 40:
            answer = post(url, "/v1/completions", {**body, "prompt": text})
            return list(answer["choices"][0]["prompt_token_ids"])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        body |= {"messages": messages, "reasoning_effort": "low", "chat_template_kwargs": {"some": 1}}
        answer = post(url, "/v1/chat/completions", body)
        return list(answer["prompt_token_ids"])

    def last(url: str) -> Any:
        """Why the newest request went where it went."""
        newest = fetched(f"{url}/debug/requests")["requests"][0]
        return fetched(f"{url}/debug/requests/{newest['request_id']}")

    ids = ask(observed.server.url, 0)
    with own_router(observed, logs / f"own-router-{seed}.log") as url:
        others = iter(range(1, 10))

        def hears() -> bool:
            ask(url, next(others))
            return last(url)["choice"]["tokenized"] is not None

        wait_for(hears, "the router hears what the engine publishes, and has the rest of it replayed")
        ask(url, 0)
        found = last(url)

    here, elsewhere = found["choice"]["attempts"][0]["scores"]
    assert found["request"]["estimated_input_tokens"] == len(ids)
    assert (found["choice"]["tokenized"]["outcome"], found["choice"]["decode"]) == ("done", here["instance"])
    assert here["uncached_tokens"] == len(ids) % CHUNK_TOKENS
    assert elsewhere["uncached_tokens"] == len(ids)


def test_who_missed_events_has_them_replayed(observed: Observed) -> None:
    observed.store(random_prompt(30, CHUNK_TOKENS))
    wait_for(lambda: bool(observed.events()), "the prompt's blocks are announced")
    first, last = observed.heard[0][0], observed.heard[-1][0]

    assert observed.heard == [(number, payload) for number, payload in observed.replay(first) if number <= last]
    assert observed.replay(last)[0] == observed.heard[-1]


def test_every_30_seconds_one_line_sums_up(observed: Observed) -> None:
    """Late in this file: most of the time until the line has gone by in the tests before."""
    observed.store(random_prompt(4, BLOCK))
    wait_for(lambda: "EMS: loads " in observed.server.log.read_text(), "the line is written")
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
