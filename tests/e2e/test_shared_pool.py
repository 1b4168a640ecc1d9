"""Two engines on one pool: the same text whatever the cache did, and no fault of the pool is a fault of a request."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engines import (
    BLOCK,
    OPTIONS,
    Node,
    Reference,
    complete,
    complete_all,
    connector,
    post,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.turns import ENDS, first_turn
from tests.kit.engine import VllmServer
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

LENGTHS = (5, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 3, 20 * BLOCK, 20 * BLOCK + 17)


class Pair:
    """Two engines that differ in all that must not matter."""

    def __init__(self, node: Node, first: VllmServer, second: VllmServer) -> None:
        self.node = node
        self.first = first
        self.second = second


@pytest.fixture(scope="module")
def pair(model: Path, logs: Path) -> Iterator[Pair]:
    with running_node("--size", "512MB") as node:
        first = VllmServer(
            model,
            log=logs / "first.log",
            kv_transfer_config=connector("kv_both"),
            options=msgspec.structs.replace(OPTIONS, prefix_caching=True, gpu_blocks=66),
            environment={**node.environment, "PYTHONHASHSEED": "1"},
        )
        second = VllmServer(
            model,
            log=logs / "second.log",
            kv_transfer_config=connector("kv_both"),
            options=OPTIONS,
            environment={**node.environment, "PYTHONHASHSEED": "2", "VLLM_SERVER_DEV_MODE": "1"},
        )
        with running(first, second):
            yield Pair(node, first, second)


def external_hits(server: VllmServer) -> float:
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def stored(node: Node) -> int:
    return node.counters["pages_committed"]


def test_text_is_the_same_cold_warm_and_from_the_other_instance(pair: Pair, reference: Reference) -> None:
    prompts = [random_prompt(100 + length, length) for length in LENGTHS]
    expected = reference.texts(prompts)
    before = external_hits(pair.second)

    assert complete_all(pair.first.url, prompts) == expected
    pair.node.wait_stored()
    assert complete_all(pair.first.url, prompts) == expected
    # The first that the other engine ever computes is the last token of a prompt, alone.
    assert complete(pair.second.url, prompts[-1]) == expected[-1]
    assert complete_all(pair.second.url, prompts) == expected

    assert external_hits(pair.second) - before == sum(LENGTHS) + LENGTHS[-1]


def test_a_full_hit_leaves_one_token_to_compute(pair: Pair, reference: Reference) -> None:
    prompt = random_prompt(7, 10 * BLOCK)
    begin = stored(pair.node)
    assert complete(pair.first.url, prompt) == reference.text(prompt)
    wait_for(lambda: stored(pair.node) > begin, "the prompt is stored")
    pair.node.wait_stored()

    before = external_hits(pair.second)
    assert complete(pair.second.url, prompt) == reference.text(prompt)
    assert external_hits(pair.second) - before == 10 * BLOCK


def test_a_shared_prefix_is_reused_and_the_rest_computed(pair: Pair, reference: Reference) -> None:
    prefix = random_prompt(8, 6 * BLOCK)
    first, second = prefix + random_prompt(9, 40), prefix + random_prompt(10, 75)
    begin = stored(pair.node)
    assert complete(pair.first.url, first) == reference.text(first)
    wait_for(lambda: stored(pair.node) > begin, "the prompt is stored")
    pair.node.wait_stored()

    before = external_hits(pair.second)
    assert complete(pair.second.url, second) == reference.text(second)
    assert external_hits(pair.second) - before == len(prefix)


def test_a_cache_salt_keeps_equal_prompts_apart(pair: Pair, reference: Reference) -> None:

    prompt = random_prompt(11, 6 * BLOCK)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    begin = stored(pair.node)
    post(pair.first.url, "/v1/completions", {**body, "cache_salt": "one"})
    wait_for(lambda: stored(pair.node) > begin, "the prompt is stored")
    pair.node.wait_stored()

    before = external_hits(pair.second)
    answer = post(pair.second.url, "/v1/completions", {**body, "cache_salt": "two"})
    assert answer["choices"][0]["text"] == reference.text(prompt)
    assert external_hits(pair.second) == before


def test_preempted_requests_say_the_same(pair: Pair, reference: Reference) -> None:
    """More requests than the engine's cache holds: it takes blocks away from some and starts these over."""
    prompts = [random_prompt(200 + number, 3 * BLOCK + number) for number in range(14)]
    before = pair.first.metrics()["vllm:num_preemptions_total"]

    texts = complete_all(pair.first.url, prompts, tokens=300, at_once=14)

    assert pair.first.metrics()["vllm:num_preemptions_total"] > before
    assert texts == reference.texts(prompts, tokens=300)


def test_a_node_that_is_killed_costs_no_request_and_is_used_again_when_back(pair: Pair, reference: Reference) -> None:
    prompts = [random_prompt(300 + number, 8 * BLOCK + number) for number in range(40)]
    expected = reference.texts(prompts)
    with ThreadPoolExecutor(8) as threads:
        running_requests = [
            threads.submit(complete, (pair.first, pair.second)[number % 2].url, prompt)
            for number, prompt in enumerate(prompts)
        ]
        wait_for(lambda: sum(future.done() for future in running_requests) >= 6, "some requests are answered")
        pair.node.kill()
        assert [future.result() for future in running_requests] == expected
    pair.node.start()

    # The engines come back by themselves: new prompts are stored by one and found by the other.
    def crosses(seed: int) -> bool:
        prompt = random_prompt(seed, 4 * BLOCK)
        before = external_hits(pair.second)
        assert complete(pair.first.url, prompt) == reference.text(prompt)
        assert complete(pair.second.url, prompt) == reference.text(prompt)
        return external_hits(pair.second) > before

    seeds = itertools.count(10_000)
    wait_for(lambda: crosses(next(seeds)), "the cache is in use again", 180)


@pytest.mark.parametrize("end", ENDS)
def test_the_next_turn_of_a_conversation_computes_the_new_tokens_only(
    pair: Pair, reference: Reference, end: str
) -> None:
    """Prompt and answer are in the pool to the token, but for the answer's last one, which was never computed.

    Of an answer that its client ends the engine has more tokens by then.  Where these fill a block, it is another one.
    """
    turn = first_turn(pair.first, random_prompt(140 + ENDS.index(end), 5 * BLOCK + 7), end)
    wait_for(lambda: pair.first.metrics()["vllm:num_requests_running"] == 0, "the answer has ended")
    pair.node.wait_stored()
    following = turn + random_prompt(15, 30)

    before = external_hits(pair.second)
    assert complete(pair.second.url, following) == reference.text(following)
    least = len(turn) - 1 if end in ("length", "stop token") else len(turn) - BLOCK
    assert least <= external_hits(pair.second) - before <= len(turn)


def test_a_reset_cache_is_not_found_again(pair: Pair, reference: Reference) -> None:
    prompt = random_prompt(16, 6 * BLOCK)
    assert complete(pair.first.url, prompt) == reference.text(prompt)
    pair.node.wait_stored()

    query = "/reset_prefix_cache?reset_external=true"
    reset = urllib.request.Request(pair.second.url + query, method="POST")  # noqa: S310 - a server of our own
    with urllib.request.urlopen(reset) as done:  # noqa: S310
        assert done.status == 200
    before = external_hits(pair.second)
    assert complete(pair.second.url, prompt) == reference.text(prompt)
    assert external_hits(pair.second) == before


def test_another_dtype_on_the_same_pool_never_hits(pair: Pair, model: Path, logs: Path, reference: Reference) -> None:
    prompt = random_prompt(12, 8 * BLOCK)
    begin = stored(pair.node)
    assert complete(pair.first.url, prompt) == reference.text(prompt)
    wait_for(lambda: stored(pair.node) > begin, "the prompt is stored")
    pair.node.wait_stored()
    other = PreparedServer(
        model,
        log=logs / "float32.log",
        kv_transfer_config=connector("kv_both"),
        options=msgspec.structs.replace(OPTIONS, dtype="bfloat16"),
        environment=pair.node.environment,
    )

    with other:
        complete(other.url, prompt)
        assert external_hits(other) == 0
        wait_for(lambda: len(pair.node.stats()["namespaces"]) == 2, "the other dtype stores blocks of its own")
    names = {namespace["name"] for namespace in pair.node.stats()["namespaces"]}
    assert len(names) == 2


def test_an_engine_killed_while_it_saves_leaves_nothing_behind(pair: Pair, reference: Reference) -> None:
    """Last in this file: the first engine does not come back."""
    prompt = random_prompt(13, 60 * BLOCK)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(complete, pair.first.url, prompt)
        wait_for(lambda: pair.node.stats()["reservations"] > 0, "the engine has pages reserved")
        pair.first.kill()
        assert lost.exception() is not None

    def clean() -> bool:
        figures = pair.node.stats()
        writing = sum(namespace["writing"] for namespace in figures["namespaces"])
        return (figures["reservations"], figures["leases"], figures["slots_resting"], writing) == (0, 0, 0, 0)

    # Well before the 30 s for which slots rest whose writer may be alive: the node saw that this one is dead.
    wait_for(clean, "everything that the engine held is free", 20)
    assert complete(pair.second.url, prompt) == reference.text(prompt)
