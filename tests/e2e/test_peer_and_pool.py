"""The hand-off from peer to peer with the pool beside it, both as children of vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.engines import (
    ANSWER_SECONDS,
    BLOCK,
    HITS_COUNT,
    OPTIONS,
    Reference,
    complete,
    complete_all,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.fleet import Fleet, external_hits, hand_off, running_router
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

SEEDS = count(6000)


def both(role: str) -> dict[str, object]:
    store = {
        "kv_connector": "AscendStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"lookup_rpc_port": "0", "backend": "mooncake", **HITS_COUNT},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [hand_off(role), store]},
    }


@pytest.fixture(scope="module")
def beside_the_pool(bare_model: Path, logs: Path) -> Iterator[Fleet]:
    with running_node("--size", "512MB") as node:
        prefill, decode = (
            PreparedServer(
                bare_model,
                log=logs / f"both-{role}.log",
                kv_transfer_config=both(role),
                options=OPTIONS,
                environment=node.environment,
            )
            for role in ("kv_producer", "kv_consumer")
        )
        with running(prefill, decode), running_router(prefill, decode, logs / "both-router.log") as url:
            yield Fleet(node, prefill, decode, url)


def test_the_peer_hands_over_and_the_pool_keeps(beside_the_pool: Fleet, reference: Reference) -> None:
    fleet = beside_the_pool
    prompts = [random_prompt(1700 + number, 4 * BLOCK + 21 * number) for number in range(8)]
    expected = reference.texts(prompts)
    before = external_hits(fleet.decode)

    assert complete_all(fleet.url, prompts) == expected

    assert external_hits(fleet.decode) - before == sum(map(len, prompts))
    wait_for(lambda: fleet.node.counters["pages_committed"] >= len(prompts), "the prefill stores what it computed")
    assert "KV cache transfer for request" in fleet.decode.log.read_text()


def test_what_the_pool_keeps_the_prefill_does_not_compute_again(beside_the_pool: Fleet, reference: Reference) -> None:
    """The second time around the prefill loads, and still hands over."""
    fleet = beside_the_pool
    prompt = random_prompt(1800, 6 * BLOCK)
    expected = reference.text(prompt)
    committed = fleet.node.counters["pages_committed"]
    assert complete(fleet.url, prompt) == expected
    wait_for(lambda: fleet.node.counters["pages_committed"] > committed, "the prefill stores the prompt")
    fleet.node.wait_stored()
    prefill, decode = external_hits(fleet.prefill), external_hits(fleet.decode)

    assert complete(fleet.url, prompt) == expected

    assert external_hits(fleet.prefill) - prefill == len(prompt)
    assert external_hits(fleet.decode) - decode == len(prompt)


def test_a_pool_that_dies_under_load_costs_no_answer_and_peers_go_on(
    beside_the_pool: Fleet, reference: Reference
) -> None:
    fleet = beside_the_pool
    prompts = [random_prompt(1850 + number, 6 * BLOCK + number) for number in range(8)]
    expected = reference.texts(prompts)
    with ThreadPoolExecutor(len(prompts)) as threads:
        before = fleet.node.counters["pages_committed"]
        texts = [threads.submit(complete, fleet.url, prompt) for prompt in prompts]
        wait_for(lambda: fleet.node.counters["pages_committed"] > before, "the first prompt is stored")
        fleet.node.kill()
        assert [text.result(ANSWER_SECONDS) for text in texts] == expected
    fresh = random_prompt(1870, 5 * BLOCK)
    hits = external_hits(fleet.decode)
    assert complete(fleet.url, fresh) == reference.text(fresh)
    assert external_hits(fleet.decode) - hits == len(fresh), "from the peer"
    fleet.node.start()

    def shared_again() -> bool:
        prompt = random_prompt(next(SEEDS), 3 * BLOCK)
        texts = [complete(fleet.prefill.url, prompt)]
        fleet.node.wait_stored()
        hits = external_hits(fleet.decode)
        texts.append(complete(fleet.decode.url, prompt))
        assert texts == [reference.text(prompt)] * 2
        return external_hits(fleet.decode) > hits

    wait_for(shared_again, "what the prefill stores the decode finds in the pool")


def test_without_a_peer_the_decode_finds_the_prompt_in_the_pool(beside_the_pool: Fleet, reference: Reference) -> None:
    """Last: the prefill server does not come back."""
    fleet = beside_the_pool
    prompt = random_prompt(1900, 5 * BLOCK)
    expected = reference.text(prompt)
    committed = fleet.node.counters["pages_committed"]
    assert complete(fleet.prefill.url, prompt) == expected
    wait_for(lambda: fleet.node.counters["pages_committed"] > committed, "the prefill stores the prompt")
    fleet.node.wait_stored()
    fleet.prefill.kill()
    before = external_hits(fleet.decode)

    assert complete(fleet.url, prompt) == expected

    assert external_hits(fleet.decode) - before == len(prompt)
