"""Every layout of KV between engines that differ: no text but that of an engine without a connector, whatever fails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ems.pool.movement.speed import LEAST_SAMPLES
from tests.e2e.engines import Prompt, complete, complete_all, leave, post, random_prompt, wait_for
from tests.e2e.layouts import LAYOUTS, RANKED, Pair, running_pair
from tests.e2e.pages import stored_pages
from tests.kit.engine import VllmServer

pytestmark = pytest.mark.e2e

FAILED = re.compile(r"KV cache transfer for request .*, [1-9][0-9]* failed\)")
LENGTHS = (5, 31, 32, 33, 150, 400, 667, 1100)


PARAMS = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.ranks) for name in RANKED)]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, logs: Path) -> Iterator[Pair]:
    layout = {**LAYOUTS, **RANKED}[request.param]
    known = request.getfixturevalue("reference") if layout.model == "test" else None
    folder = logs / str(request.param)
    folder.mkdir()
    with running_pair(layout, folder, known) as running:
        yield running


def external_hits(server: VllmServer) -> float:
    return server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def store(pair: Pair, server: VllmServer, prompts: list[Prompt]) -> None:
    """Let ``server`` compute and store ``prompts``."""
    assert complete_all(server.url, prompts) == pair.reference.texts(prompts)
    pair.wait_stored()


def test_the_model_notices_any_block_that_is_not_the_prompts(pair: Pair) -> None:
    """Without this the comparisons below would prove nothing."""
    prompt = random_prompt(1, 1024)
    others = []
    for start in range(0, 1024, 64):
        other = list(prompt)
        other[start : start + 64] = random_prompt(2 + start, 64)
        others.append(other)

    texts = pair.reference.texts([prompt, *others], tokens=64)

    assert texts.count(texts[0]) == 1


def test_a_prompt_has_one_text_whether_it_is_computed_or_kept(pair: Pair) -> None:
    """Among the prompts are two that latent attention in bfloat16 answers otherwise when all but a token is kept."""
    prompts = [random_prompt(6000 + number, 4 * pair.block) for number in range(12)]
    store(pair, pair.first, prompts)

    for server in pair.servers:
        assert complete_all(server.url, prompts) == pair.reference.texts(prompts)


@pytest.mark.parametrize("forth", [True, False], ids=["from-first-to-second", "from-second-to-first"])
def test_what_one_stored_serves_the_other(pair: Pair, *, forth: bool) -> None:
    writer, reader = pair.servers if forth else pair.servers[::-1]
    prompts = [random_prompt(100 * forth + length, length) for length in LENGTHS]
    store(pair, writer, prompts)
    before = external_hits(reader)

    assert complete_all(reader.url, prompts) == pair.reference.texts(prompts)

    # Nothing is computed but each prompt's last token.
    assert sum(LENGTHS) - len(LENGTHS) <= external_hits(reader) - before <= sum(LENGTHS)


def test_a_shared_prefix_is_loaded_and_the_rest_computed(pair: Pair) -> None:
    prefix = random_prompt(10, 20 * pair.block)
    store(pair, pair.first, [prefix + random_prompt(11, 50)])
    prompts = [prefix + random_prompt(12, 40), prefix[: 11 * pair.block] + random_prompt(13, 300)]
    before = external_hits(pair.second)

    assert complete_all(pair.second.url, prompts) == pair.reference.texts(prompts)

    assert external_hits(pair.second) - before == 20 * pair.block + 11 * pair.block


@pytest.mark.parametrize("blocks", [0, 5], ids=["within-the-first-block", "some-blocks"])
def test_the_next_turn_computes_the_new_tokens_only(pair: Pair, blocks: int) -> None:
    turn = random_prompt(140 + blocks, blocks * pair.block + 7)
    tokens = 50 if blocks else pair.block // 4
    body = {"prompt": turn, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = post(pair.second.url, "/v1/completions", body)["choices"][0]["token_ids"]
    pair.wait_stored()
    following = turn + answer + random_prompt(15, 30)
    before = external_hits(pair.first)

    assert complete(pair.first.url, following) == pair.reference.text(following)

    assert external_hits(pair.first) - before == len(turn) + len(answer) - 1


def test_pages_that_are_overwritten_after_they_were_found_are_computed(pair: Pair) -> None:
    """Two where all are needed; where windows make some needless, all of one kind of layer.

    Each engine has learned from some sound loads how long one takes, so it may make them within steps.
    """
    sound = [random_prompt(6100 + number, 2 * pair.block + 3) for number in range(2 * LEAST_SAMPLES)]
    for writer, reader, prompts in (
        (pair.first, pair.second, sound[:LEAST_SAMPLES]),
        (pair.second, pair.first, sound[LEAST_SAMPLES:]),
    ):
        store(pair, writer, prompts)
        assert complete_all(reader.url, prompts, at_once=1) == pair.reference.texts(prompts)
    for case in range(6):
        writer, reader = pair.servers if case % 2 else reversed(pair.servers)
        prompt = random_prompt(6000 + case, 24 * pair.block + 5)
        pair.wait_stored()
        before = set(stored_pages(pair.node.directory))
        store(pair, writer, [prompt])
        pages = [page for page in stored_pages(pair.node.directory) if page not in before]
        kinds = sorted({page.segment for page in pages})
        if pair.layout.model != "hybrid":  # its planes are in segments of their own
            # One of two that lie so far apart is the prompt's, and no other one's of its answer.
            broken = [pages[(case * len(pages) // 6 + apart) % len(pages)] for apart in (0, len(pages) // 2)]
        else:
            broken = [page for page in pages if page.segment == kinds[case % len(kinds)]]
        for page in broken:
            page.overwrite()
        failures = len(FAILED.findall(reader.log.read_text()))

        # The second time the engine meets the same fault again, or what it keeps itself.
        assert complete_all(reader.url, [prompt] * 2, at_once=1) == pair.reference.texts([prompt] * 2)

        assert len(FAILED.findall(reader.log.read_text())) > failures


def test_whoever_leaves_takes_nothing_along(pair: Pair) -> None:
    """Clients that go away at any moment: while their prompt is loaded, computed, or their answer streams."""
    random = Random(40)
    prompts = [random_prompt(40 + number, 9 * pair.block + number) for number in range(8)]
    store(pair, pair.first, prompts[:4])
    with ThreadPoolExecutor(8) as threads:
        for server in pair.servers:
            list(threads.map(leave, [server.url] * len(prompts), prompts, random.choices(range(4), k=len(prompts))))

    wait_for(lambda: all(server.metrics()["vllm:num_requests_running"] == 0 for server in pair.servers), "all left")
    for server in pair.servers:
        assert complete_all(server.url, prompts) == pair.reference.texts(prompts)


def crosses(pair: Pair, seed: int) -> bool:
    """Whether what the first engine stores is found by the second."""
    fresh = random_prompt(seed, 4 * pair.block)
    before = external_hits(pair.second)
    for server in pair.servers:
        assert complete(server.url, fresh) == pair.reference.text(fresh)
    return external_hits(pair.second) > before


def test_a_node_that_dies_between_lookup_and_load_costs_a_computation(pair: Pair) -> None:
    """The engine is full, so that a request waits with what it was promised while the node is killed."""
    seeds = itertools.count(10_000)
    # A busy machine may have made both engines leave the pool alone for a while.
    wait_for(lambda: crosses(pair, next(seeds)), "the cache is in use", 180)
    prompt = random_prompt(60, 20 * pair.block)
    store(pair, pair.first, [prompt])
    busy = [random_prompt(61 + number, 40) for number in range(pair.layout.options.max_num_seqs)]
    with ThreadPoolExecutor(len(busy) + 1) as threads:
        answers = [threads.submit(complete, pair.second.url, each, 400) for each in busy]
        wait_for(lambda: pair.second.metrics()["vllm:num_requests_running"] == len(busy), "the engine is full")
        waiting = threads.submit(complete, pair.second.url, prompt)
        wait_for(lambda: pair.node.stats()["leases"] > 0, "the waiting request is promised its blocks")
        pair.node.kill()
        assert not waiting.done()
        assert waiting.result() == pair.reference.text(prompt)
        # Long answers, so that the engine is full for a while; their beginnings are enough to compare.
        for answer, begin in zip(answers, pair.reference.texts(busy, tokens=40), strict=True):
            assert answer.result().startswith(begin)
    pair.node.start()

    wait_for(lambda: crosses(pair, next(seeds)), "the cache is in use again", 180)


def test_a_lookup_that_nobody_answers_is_a_miss(pair: Pair) -> None:
    """Last but one: whose node was away twice in a minute leaves it alone for the rest of that."""
    prompts = [random_prompt(30 + number, 6 * pair.block) for number in range(2)]
    store(pair, pair.first, prompts)
    expected = pair.reference.texts([*prompts, random_prompt(39, 300)])

    with pair.node.frozen():
        assert complete_all(pair.second.url, [*prompts, random_prompt(39, 300)]) == expected

    assert complete_all(pair.second.url, [*prompts, random_prompt(39, 300)]) == expected


def test_at_the_end_nothing_is_held(pair: Pair) -> None:
    """Last: neither blocks of the engines nor anything of the pool."""

    def figures() -> list[Any]:
        pool = pair.node.stats()
        engines = [server.metrics() for server in pair.servers]
        used = [each["vllm:kv_cache_usage_perc"] for each in engines]
        return [*used, pool["leases"], pool["reservations"], pool["slots_resting"]]

    wait_for(lambda: not any(figures()), "nothing is held")
