"""Prefill and decode apart: the router in front, the hand-off through the pool, the answers of one engine."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.e2e.engines import (
    ANSWER_SECONDS,
    BLOCK,
    OPTIONS,
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
from tests.e2e.fleet import CHAT, Fleet, external_hits, running_router
from tests.kit.prepared import PreparedServer

pytestmark = pytest.mark.e2e

SEEDS = count(2000)


@pytest.fixture(scope="module", params=[True, False], ids=["steps-overlap", "step-by-step"])
def fleet(request: pytest.FixtureRequest, model: Path, logs: Path) -> Iterator[Fleet]:
    options = msgspec.structs.replace(OPTIONS, async_scheduling=request.param)
    with running_node("--size", "512MB") as node:
        prefill, decode = (
            PreparedServer(
                model,
                log=logs / f"{role}.log",
                kv_transfer_config=connector(role, load_async=None),
                options=options,
                environment=node.environment,
            )
            for role in ("kv_producer", "kv_consumer")
        )
        with running(prefill, decode), running_router(prefill, decode, logs / "router.log") as url:
            yield Fleet(node, prefill, decode, url)


def test_completions_through_the_pair_say_what_one_engine_says(fleet: Fleet, reference: Reference) -> None:
    """No decode recomputes a block that its prefill stored, however soon it arrives."""
    prompts = [random_prompt(500 + number, 3 * BLOCK + 37 * number) for number in range(16)]
    expected = reference.texts(prompts)
    before = external_hits(fleet.decode)

    assert complete_all(fleet.url, prompts) == expected

    tokens = sum(map(len, prompts))
    assert tokens - len(prompts) <= external_hits(fleet.decode) - before <= tokens, "all but the last one of each"


def test_a_chat_through_the_pair_says_what_one_engine_says(fleet: Fleet, reference: Reference) -> None:
    before = external_hits(fleet.decode)
    answer = post(fleet.url, "/v1/chat/completions", CHAT)

    assert answer["choices"][0]["message"]["content"] == reference.chat(CHAT)
    assert answer["usage"]["completion_tokens"] <= 24
    assert external_hits(fleet.decode) > before


def stream(url: str, body: dict[str, Any]) -> tuple[str, list[bytes]]:
    """The content type and the lines of a streamed chat."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_SECONDS)
    payload = json.dumps({"model": "tiny", "stream": True, **body})
    connection.request("POST", "/v1/chat/completions", payload, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    lines = [line for line in answer.read().split(b"\n") if line]
    connection.close()
    return answer.headers["Content-Type"], lines


def test_a_streamed_chat_comes_through_as_the_engine_sends_it(fleet: Fleet, reference: Reference) -> None:
    kind, lines = stream(fleet.url, CHAT)

    assert kind.startswith("text/event-stream")
    assert lines[-1] == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == reference.chat(CHAT)


def test_the_client_library_of_openai_runs_unchanged(fleet: Fleet, reference: Reference) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", **CHAT}
        whole = client.chat.completions.create(**asked)
        pieces = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        streamed = list(pieces)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="unknown", prompt=[400], max_tokens=1)

        assert [model.id for model in client.models.list()] == ["tiny"]
    assert whole.choices[0].message.content == reference.chat(CHAT)
    text = "".join(piece.choices[0].delta.content or "" for piece in streamed if piece.choices)
    assert text == reference.chat(CHAT)
    assert streamed[-1].usage is not None
    assert streamed[-1].usage.completion_tokens <= 24


def test_the_benchmark_of_vllm_runs_unchanged(fleet: Fleet, model: Path, tmp_path: Path) -> None:
    # What `vllm bench serve` runs; the command itself asks for the metadata of a package that the CPU build is not.
    script = "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    script += "serve.add_cli_args(parser); serve.main(parser.parse_args())"
    command = [sys.executable, "-c", script, "--base-url", fleet.url]
    command += ["--model", "tiny", "--tokenizer", str(model), "--dataset-name", "random", "--num-prompts", "6"]
    command += ["--random-input-len", "40", "--random-output-len", "4", "--save-result", "--result-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    [result] = tmp_path.glob("*.json")
    told = json.loads(result.read_text())
    assert (told["completed"], told["total_output_tokens"]) == (6, 24)


def test_the_prefill_keeps_blocks_until_they_are_stored_and_both_sides_say_so(fleet: Fleet) -> None:
    complete(fleet.url, random_prompt(600, 4 * BLOCK))

    assert "Delaying free of 4 blocks for request" in fleet.prefill.log.read_text()
    assert "KV cache transfer for request" in fleet.decode.log.read_text()


def test_a_pool_that_dies_under_load_costs_no_answer_and_is_used_again(fleet: Fleet, reference: Reference) -> None:
    """What is killed amid hand-offs is a cache: decodes compute by themselves, and load again once the node is back."""
    prompts = [random_prompt(640 + number, 6 * BLOCK + number) for number in range(8)]
    expected = reference.texts(prompts)
    with ThreadPoolExecutor(8) as threads:
        before = fleet.node.counters["pages_committed"]
        texts = [threads.submit(complete, fleet.url, prompt) for prompt in prompts]
        wait_for(lambda: fleet.node.counters["pages_committed"] > before, "the first hand-off has begun")
        fleet.node.kill()
        assert [text.result(ANSWER_SECONDS) for text in texts] == expected
    fleet.node.start()

    def hands_over() -> bool:
        fresh = random_prompt(next(SEEDS), 3 * BLOCK)
        hits = external_hits(fleet.decode)
        assert complete(fleet.url, fresh) == reference.text(fresh)
        return external_hits(fleet.decode) > hits

    wait_for(hands_over, "prefill and decode use the pool again")


def test_an_error_of_the_engine_comes_through_with_status_and_body(fleet: Fleet) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(fleet.url, "/v1/completions", {"model": "unknown", "prompt": [400], "max_tokens": 1})

    with error.value as answer:
        assert answer.code == 404
        assert json.load(answer)["error"]["type"] == "NotFoundError"


def test_a_decode_whose_prefill_is_dead_computes_by_itself(fleet: Fleet, reference: Reference) -> None:
    """Last but one: the prefill server does not come back."""
    prompts = [random_prompt(700 + number, 5 * BLOCK) for number in range(6)]
    expected = reference.texts(prompts)
    with ThreadPoolExecutor(6) as threads:
        texts = [threads.submit(complete, fleet.url, prompt) for prompt in prompts]
        fleet.prefill.kill()
        assert [text.result() for text in texts] == expected
    assert complete(fleet.url, prompts[0]) == expected[0]


def test_with_all_servers_dead_the_answer_is_an_error_in_openai_form(fleet: Fleet) -> None:
    fleet.decode.kill()

    with pytest.raises(urllib.error.HTTPError) as error:
        complete(fleet.url, random_prompt(800, 40))

    with error.value as answer:
        assert answer.code == 503
        assert set(json.load(answer)["error"]) == {"message", "type", "param", "code"}


def test_no_pool_a_pool_too_small_and_a_pool_started_by_the_engine(
    model: Path, logs: Path, reference: Reference, tmp_path: Path
) -> None:
    """An engine serves on without a usable pool and says why; without a node it starts one that outlives it."""
    prompts = [random_prompt(900 + number, 4 * BLOCK) for number in range(4)]
    expected = reference.texts(prompts)
    options = msgspec.structs.replace(OPTIONS, max_model_len=1024)
    with running_node("--size", "32KB") as small, running_node("--size", "16MB") as home:
        home.stop()
        tiny_pool = PreparedServer(
            model,
            log=logs / "small-pool.log",
            kv_transfer_config=connector("kv_both"),
            options=options,
            environment=small.environment,
        )
        own_pool = PreparedServer(
            model,
            log=logs / "own-pool.log",
            kv_transfer_config=connector("kv_both", pool_size="64MB", lookup_timeout_ms="500"),
            options=options,
            environment={**home.environment, "EMS_AUTOSTART": "1"},
        )
        with running(tiny_pool, own_pool):
            assert complete_all(tiny_pool.url, prompts) == expected
            home.wait_listening()

            def stores() -> bool:
                # What was computed before the node was there is not stored.
                assert complete_all(own_pool.url, prompts) == expected
                return home.counters["pages_committed"] >= 16

            wait_for(stores, "the engine's own node stores")
        said = tiny_pool.log.read_text()
        assert "EMS pool cannot be used" in said
        assert "does not fit in a segment" in said
        # The engine is gone, its node is not.
        assert home.stats()["autostarted"] is True
        stopped = subprocess.run(
            [sys.executable, "-m", "ems.cli", "stop", "--socket", str(home.socket)], check=False, timeout=30
        )
        assert stopped.returncode == 0
