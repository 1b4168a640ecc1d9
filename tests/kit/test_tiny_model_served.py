"""The made-up model behind real vLLM: what its weights promise (see tests.kit.tiny_weights)."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.tiny_model import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LENGTHS = (3, 31, 32, 33, 100, 127, 128, 129, 300, 700, 1024, 1500)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """One that computes prompts whole, one that computes them in chunks, keeps them, and begins steps early."""
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder / "model", "test")
    debug = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    whole = VllmServer(model, log=folder / "whole.log", environment=debug)
    chunks = VllmServer(
        model,
        log=folder / "chunks.log",
        options=EngineOptions(max_num_batched_tokens=96, block_size=32, prefix_caching=True, async_scheduling=True),
        environment=debug,
    )
    with ExitStack() as stack:
        for server in (whole, chunks):
            stack.callback(server.stop)
            server.start()
        for server in (whole, chunks):
            server.wait_ready(1200)
        yield whole, chunks


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [source.choices(range(300, 1000), k=length) for length in LENGTHS]


def post(server: VllmServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        return dict(json.load(answer))


def complete(server: VllmServer, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
    return str(post(server, "/v1/completions", body)["choices"][0]["text"])


def complete_all(server: VllmServer, prompts: list[list[int]], at_once: int) -> list[str]:
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda prompt: complete(server, prompt), prompts))


def test_steps_overlap_where_they_are_to(servers: tuple[VllmServer, VllmServer]) -> None:
    """VLLM's engine says how many steps it has under way at once where that is more than one."""
    whole, chunks = (server.log.read_text() for server in servers)

    assert "Batch queue is enabled with size 2" in chunks
    assert "Batch queue is enabled" not in whole


def test_text_does_not_depend_on_how_it_is_computed(
    servers: tuple[VllmServer, VllmServer], prompts: list[list[int]]
) -> None:
    """Whole or in chunks, alone or in a batch, computed or taken from the engine's cache."""
    whole, chunks = servers
    expected = complete_all(whole, prompts, at_once=1)

    assert complete_all(whole, prompts, at_once=6) == expected
    assert complete_all(chunks, prompts, at_once=6) == expected
    hits = chunks.metrics()["vllm:prefix_cache_hits_total"]
    assert complete_all(chunks, prompts, at_once=1) == expected
    assert chunks.metrics()["vllm:prefix_cache_hits_total"] > hits


def test_text_depends_on_the_whole_prompt(servers: tuple[VllmServer, VllmServer]) -> None:
    """Other tokens in any one block of 128 give another text: what a wrong block of KV would do."""
    source = random.Random(6)
    prompt = source.choices(range(300, 1000), k=1024)
    changed = []
    for start in range(0, 1024, 128):
        other = list(prompt)
        other[start : start + 128] = source.choices(range(300, 1000), k=128)
        changed.append(other)

    texts = complete_all(servers[0], [prompt, *changed], at_once=4)

    assert len(set(texts)) == len(texts)


def test_text_is_varied_and_readable(servers: tuple[VllmServer, VllmServer], prompts: list[list[int]]) -> None:
    texts = complete_all(servers[0], prompts, at_once=4)

    assert len(set(texts)) == len(texts)
    words = " ".join(texts).split()
    assert len(set(words)) > len(words) / 3
    assert all(word.isascii() and word.isalpha() for word in words)


def test_chat(servers: tuple[VllmServer, VllmServer]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello, wörld! 你好"}], "max_tokens": 5}
    answer = post(servers[0], "/v1/chat/completions", body)

    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["message"]["content"].strip()
