"""Prefill and decode apart with the hand-off from peer to peer, as people write it.

The model's configuration lacks ``head_dim``, as many do.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.engines import (
    ANSWER_SECONDS,
    BLOCK,
    OPTIONS,
    Prompt,
    Reference,
    complete,
    complete_all,
    post,
    random_prompt,
    running,
    running_node,
    wait_for,
)
from tests.e2e.fleet import CHAT, Fleet, external_hits, hand_off, running_router
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def alone(bare_model: Path, logs: Path) -> Iterator[Fleet]:
    with running_node("--size", "64MB") as node:
        prefill, decode = (
            PreparedServer(
                bare_model,
                log=logs / f"peer-{role}.log",
                kv_transfer_config={**hand_off(role), "engine_id": "0"},
                options=OPTIONS,
                environment=node.environment,
            )
            for role in ("kv_producer", "kv_consumer")
        )
        with running(prefill, decode), running_router(prefill, decode, logs / "peer-router.log") as url:
            yield Fleet(node, prefill, decode, url)


def test_the_decode_takes_every_block_from_its_peer(alone: Fleet, reference: Reference) -> None:
    prompts = [random_prompt(1500 + number, 3 * BLOCK + 37 * number) for number in range(8)]
    expected = reference.texts(prompts)
    before = external_hits(alone.decode)

    assert complete_all(alone.url, prompts) == expected

    assert external_hits(alone.decode) - before == sum(map(len, prompts))
    assert alone.node.counters.get("pages_committed", 0) == 0, "the pool has no part in it"


def test_a_chat_from_peer_to_peer_says_what_one_engine_says(alone: Fleet, reference: Reference) -> None:
    answer = post(alone.url, "/v1/chat/completions", CHAT)

    assert answer["choices"][0]["message"]["content"] == reference.chat(CHAT)


def test_both_sides_say_what_they_do_and_what_they_ignore(alone: Fleet) -> None:
    complete(alone.url, random_prompt(1600, 4 * BLOCK))

    prefill, decode = alone.prefill.log.read_text(), alone.decode.log.read_text()
    assert "Delaying free of 4 blocks for request" in prefill
    assert "KV cache transfer for request" in decode
    for said in (prefill, decode):
        assert said.count("without a meaning for MooncakeConnectorV1: kv_parallel_size, kv_buffer_device") == 1
        assert said.count("in kv_connector_extra_config: use_ascend_direct") == 1
    assert "(kv_port) is taken on this machine" in prefill + decode, "both were told the same port"


def test_a_prefill_that_dies_under_load_costs_no_answer(alone: Fleet, reference: Reference) -> None:
    """Last but one: the prefill server does not come back, and what it had not handed over is computed."""
    prompts = [random_prompt(1650 + number, 8 * BLOCK + number) for number in range(12)]
    expected = reference.texts(prompts)
    with ThreadPoolExecutor(len(prompts)) as threads:
        before = external_hits(alone.decode)
        texts = [threads.submit(complete, alone.url, prompt) for prompt in prompts]
        wait_for(lambda: external_hits(alone.decode) > before, "the first prompt is handed over")
        alone.prefill.kill()
        assert [text.result(ANSWER_SECONDS) for text in texts] == expected
    assert complete(alone.url, prompts[0]) == expected[0]


def test_a_decode_that_dies_under_load_leaves_nobody_without_an_answer(alone: Fleet, reference: Reference) -> None:
    prompts = [random_prompt(1680 + number, 3 * BLOCK + number) for number in range(6)]
    expected = reference.texts(prompts, tokens=200)

    def answer(prompt: Prompt) -> str:
        try:
            return complete(alone.url, prompt, tokens=200)
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["error"]["code"])

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(answer, prompt) for prompt in prompts]
        wait_for(lambda: alone.decode.metrics().get("vllm:num_requests_running", 0.0) > 0, "it decodes")
        alone.decode.kill()
        for text, right in zip(answers, expected, strict=True):
            assert text.result(ANSWER_SECONDS) in {right, "upstream_broken", "no_decode_server"}
