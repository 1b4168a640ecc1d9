"""vLLM's own ``OffloadingConnector`` over the pool: what one engine stored another loads, with the right texts.

The other engine has ``EmsStoreConnector``, and where EMS knows the order of tokens in a block, blocks of another size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.e2e.engines import (
    OPTIONS,
    PATIENT,
    Node,
    Reference,
    complete,
    complete_all,
    connector,
    leave,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.layouts import TWO_RANKS
from tests.e2e.pages import stored_pages
from tests.e2e.turns import ENDS, TOKENS, first_turn
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.prepared import PreparedServer
from tests.kit.tiny_model import Size, make_model

pytestmark = pytest.mark.e2e

MODELS: dict[Size, EngineOptions] = {
    "test": OPTIONS,
    "hybrid": OPTIONS,
    "mla": msgspec.structs.replace(OPTIONS, block_size=16, arguments=("--attention-backend", "CPU_MLA")),
    # vLLM hands out a state where a prompt ends, and every so many tokens; without prefix caching none at all.  Its
    # kernel for CPUs takes bfloat16 only.
    "ssm": msgspec.structs.replace(
        OPTIONS,
        block_size=64,
        dtype="bfloat16",
        prefix_caching=True,
        arguments=("--prefix-cache-retention-interval", "256"),
    ),
}
OTHER_BLOCKS = {"test": 128, "mla": 64}
CHUNK = 128
"""Tokens of a chunk.  With windows, or with states, chunks are single blocks."""


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


class Pair:
    """Two engines on one pool, one of each name, and what they should say.  The second's steps do not overlap."""

    def __init__(self, size: Size, node: Node, one: VllmServer, two: VllmServer, reference: Reference) -> None:
        self.size = size
        self.node = node
        self.one, self.two = one, two
        self.reference = reference


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, model: Path, logs: Path) -> Iterator[Pair]:
    size: Size = request.param
    known = request.getfixturevalue("reference") if size == "test" else None
    path = model if known else make_model(logs / f"offloading-{size}", size)
    kind = VllmServer if size == "test" else PreparedServer  # one pair is started as people start theirs
    with running_node("--size", "256MB") as node:

        def server(name: str, transfer: dict[str, object] | None = None, **options: object) -> VllmServer:
            return kind(
                path,
                log=logs / f"offloading-{size}-{name}.log",
                options=msgspec.structs.replace(MODELS[size], **options),
                environment=node.environment,
                kv_transfer_config=transfer,
            )

        blocks = OTHER_BLOCKS.get(size, MODELS[size].block_size)
        plain, one = server("plain"), server("one", offloading(block_size=CHUNK))
        two = server("two", connector("kv_both", chunk_tokens=CHUNK), async_scheduling=False, block_size=blocks)
        with running(one, two, *([] if known else [plain])):
            yield Pair(size, node, one, two, known or Reference(plain.url))


def hits(server: VllmServer) -> float:
    """Tokens that came from the pool until now."""
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def test_another_engine_loads_what_one_stored(pair: Pair) -> None:
    """Each in its turn stores, so both are seen to store and to load."""
    states = 0.0
    for number, (writer, reader) in enumerate(((pair.one, pair.two), (pair.two, pair.one))):
        prompts = [random_prompt(100 + 10 * number + at, 900 + 37 * at) for at in range(4)]
        before = hits(writer)
        assert complete_all(writer.url, prompts) == pair.reference.texts(prompts)
        pair.node.wait_stored()
        assert hits(writer) == before

        before = hits(reader)
        assert complete_all(reader.url, prompts) == pair.reference.texts(prompts)
        least = sum(len(prompt) // CHUNK * CHUNK for prompt in prompts) - len(prompts) * CHUNK
        assert hits(reader) - before >= least

        before = hits(reader)
        shared = [prompts[0][:512] + random_prompt(200 + 10 * number + at, 100) for at in range(3)]
        assert complete_all(reader.url, shared) == pair.reference.texts(shared)
        if pair.size == "ssm":
            states = max(states, hits(reader) - before)
        elif pair.size != "hybrid":  # of a window only the last chunks of a prompt are stored
            assert hits(reader) - before == 3 * 512
    if pair.size == "ssm":
        # What one of them loaded the others find in the engine.  A state in the middle of a prompt leaves the engine
        # within the next steps: its store may be called off where the machine has other work.
        assert states >= 512


@pytest.mark.parametrize("end", ENDS)
def test_the_next_turn_of_a_conversation_computes_less_than_two_chunks_of_the_last(pair: Pair, end: str) -> None:
    """States there are only where the prompt ended, and in between at a distance of some chunks."""
    lost = TOKENS + 2 * CHUNK if pair.size == "ssm" else 2 * CHUNK
    for number, (writer, reader) in enumerate(((pair.one, pair.two), (pair.two, pair.one))):
        turn = first_turn(writer, random_prompt(400 + 10 * number + ENDS.index(end), 5 * CHUNK + 7), end)
        wait_for(lambda: writer.metrics()["vllm:num_requests_running"] == 0, "the answer has ended")  # noqa: B023
        pair.node.wait_stored()
        following = turn + random_prompt(15, 30)

        before = hits(reader)
        assert complete(reader.url, following) == pair.reference.text(following)
        assert hits(reader) - before > len(turn) - lost


def test_chunks_that_are_overwritten_are_computed(pair: Pair) -> None:
    for number, (writer, reader) in enumerate(((pair.one, pair.two), (pair.two, pair.one))):
        sound, broken = set(stored_pages(pair.node.directory)), random_prompt(250 + number, 500)
        assert complete(writer.url, broken) == pair.reference.text(broken)
        pair.node.wait_stored()
        for page in set(stored_pages(pair.node.directory)) - sound:
            page.overwrite()
        assert complete(reader.url, broken) == pair.reference.text(broken)
        assert re.search(r"EMS (found \d+ pages that are not right|load for request)", reader.log.read_text())


def test_whoever_leaves_takes_nothing_along(pair: Pair) -> None:
    """Clients that go away at any moment: while their prompt is loaded, computed, or their answer streams."""
    random = Random(40)
    prompts = [random_prompt(500 + number, 9 * CHUNK + number) for number in range(8)]
    assert complete_all(pair.one.url, prompts[:4]) == pair.reference.texts(prompts[:4])
    pair.node.wait_stored()
    engines = (pair.one, pair.two)
    with ThreadPoolExecutor(8) as threads:
        for engine in engines:
            list(threads.map(leave, [engine.url] * 8, prompts, random.choices(range(4), k=8)))

    def held() -> list[float]:
        used = [engine.metrics()["vllm:kv_cache_usage_perc"] for engine in engines]
        pool = pair.node.stats()
        return [*used, pool["leases"], pool["reservations"]]

    wait_for(lambda: not any(held()), "nothing is held")
    for engine in engines:
        assert complete_all(engine.url, prompts) == pair.reference.texts(prompts)


def test_a_node_that_dies_costs_computations_until_it_is_back(pair: Pair) -> None:
    prompts = [random_prompt(600 + number, 700) for number in range(4)]
    assert complete_all(pair.one.url, prompts[:2]) == pair.reference.texts(prompts[:2])
    pair.node.wait_stored()
    pair.node.kill()
    assert complete_all(pair.two.url, prompts) == pair.reference.texts(prompts)
    pair.node.start()

    seeds = itertools.count(700)

    def hit_again() -> bool:
        # A new one, which the engine does not keep itself.
        prompt = random_prompt(next(seeds), 200)
        assert complete(pair.two.url, prompt) == pair.reference.text(prompt)
        pair.node.wait_stored()
        before = hits(pair.one)
        assert complete(pair.one.url, prompt) == pair.reference.text(prompt)
        return hits(pair.one) > before

    wait_for(hit_again, "pages are loaded from the node that is back")
    wait_for(lambda: not pair.node.stats()["leases"], "nothing is held")
    assert pair.node.counters["pages_corrupt"] == 0


@pytest.fixture
def node() -> Iterator[Node]:
    # Each group of each rank has segments of its own.
    with running_node("--size", "1GB") as running_one:
        yield running_one


@pytest.mark.ranks
@pytest.mark.parametrize("size", ["test", "mla", "ssm"])
def test_engines_of_one_and_of_two_ranks_share_what_each_rank_stored(size: Size, logs: Path, node: Node) -> None:
    """States are those of a rank, so engines of other sizes share none."""
    model, options = make_model(logs / f"ranks-{size}", size), MODELS[size]
    two_ranks = msgspec.structs.replace(options, arguments=(*options.arguments, *TWO_RANKS))
    ours, vllms = connector("kv_both", chunk_tokens=CHUNK), offloading(block_size=CHUNK)

    def server(name: str, transfer: dict[str, object], ranks: EngineOptions) -> VllmServer:
        log = logs / f"ranks-{size}-{name}.log"
        return PreparedServer(model, log=log, options=ranks, environment=node.environment, kv_transfer_config=transfer)

    prompts = [random_prompt(100 + number, 500 + 37 * number) for number in range(4)]
    with PreparedServer(model, log=logs / f"ranks-{size}-plain.log", options=options) as plain:
        expected = complete_all(plain.url, prompts)
    with server("writer", vllms, two_ranks) as writer:
        assert complete_all(writer.url, prompts) == expected
        node.wait_stored()
    readers = [("same", vllms, two_ranks), ("ours", ours, two_ranks)]
    for name, transfer, ranks in [*readers, *([("one", ours, options)] if size != "ssm" else [])]:
        with server(name, transfer, ranks) as reader:
            assert complete_all(reader.url, prompts) == expected
            assert hits(reader) >= sum(len(prompt) // CHUNK * CHUNK for prompt in prompts)
            wait_for(lambda: not node.stats()["leases"], "nothing is held")
    assert node.counters["pages_corrupt"] == 0
