"""Prompts that a node is told of by their tokens: their pages come up before anybody looks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from ems.pool.keys import KeyChain, page_keys, split_keys
from ems.pool.names import qualified
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.service import prompts
from ems.pool.service.prompts import Fetched, PromptFetcher
from tests.pool.tiers.administered import Administered, administered, below
from tests.pool.tiers.node_with_tier import NAME, stored

CHUNK = 4
FACTS = {"kind": "vllm", "tenant": "t", "model": "m", "chunk_tokens": str(CHUNK), "page_shards": "2", "window": "0"}
PROMPT = list(range(6 * CHUNK + 1))
IDENTITY = NAME.rpartition("/")[0]


def keys_of(identity: str, tokens: list[int] = PROMPT, shards: int = 2) -> list[bytes]:
    chain = KeyChain(identity, CHUNK)
    chain.extend(tokens)
    return split_keys(page_keys(chain.packed(0, len(chain)), shards))


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Callable[..., Administered]]:
    async with administered(tmp_path) as make:
        yield make


def described(one: Administered, name: str = NAME, **said: str) -> PromptFetcher:
    one.node.core.reasons.layouts.describe(name, FACTS | said)
    return PromptFetcher(one.node.core, one.tier_manager)


def fetched(fetcher: PromptFetcher, tokens: list[int], tenant: str = "", model: str = "m") -> tuple[Fetched, int]:
    """What came of it, and in how many steps."""
    steps, count = fetcher.fetch(tenant, model, tokens), 0
    while True:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            return end.value, count


async def ready(one: Administered, pages: int) -> None:
    await one.until(lambda: one.node.core.stats()["bytes_touched"] == 2 << 20)
    await one.until(lambda: one.tier.figures()["pages"] == pages and one.state._keeping is None)


async def test_pages_of_a_prompt_come_up(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), keys_of(IDENTITY)
    await stored(one, keys)
    one.forget()
    fetcher = described(one)
    assert fetched(fetcher, PROMPT)[0] == Fetched(12, 12)
    await one.until(lambda: one.present(keys) == 12)
    assert one.right(keys)
    assert one.node.core.counters.prefetch_hints == 1
    assert fetched(fetcher, PROMPT)[0] == Fetched(12, 12), "nothing is left to come"
    assert fetched(fetcher, PROMPT[: CHUNK - 1])[0] == Fetched(0, 0)
    assert fetched(fetcher, [9, *PROMPT])[0] == Fetched(12, 0), "another prompt has other pages"


async def test_a_namespace_that_only_a_tier_knows_is_opened(bench: Callable[..., Administered], tmp_path: Path) -> None:
    name = "t/n/l/0.0"
    keys = keys_of("t/n/l")
    below(tmp_path / "tier", name, keys)
    one = bench()
    await ready(one, 12)
    assert fetched(described(one, name), PROMPT)[0] == Fetched(12, 12)
    number = one.node.core.find_namespace(name)
    await one.until(lambda: len(one.node.core.namespaces[number].index) == 12)
    assert fetched(described(one, "t/nowhere/l/0.0"), [7, *PROMPT])[0] == Fetched(24, 0)
    assert one.node.core.find_namespace("t/nowhere/l/0.0") < 0


async def test_of_a_window_only_what_is_in_sight_comes(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), keys_of(IDENTITY, shards=1)
    await stored(one, keys)
    one.forget()
    assert fetched(described(one, page_shards="1", window="5"), PROMPT)[0] == Fetched(2, 2)
    await one.until(lambda: one.present(keys[4:]) == 2)
    assert one.present(keys) == 0


async def test_a_tenant_has_nothing_but_its_own_brought_up(bench: Callable[..., Administered], tmp_path: Path) -> None:
    names = [qualified(tenant, "t/n/l/0.0") for tenant in ("ann", "bob")]
    for name in names:
        below(tmp_path / "tier", name, keys_of("t/n/l"))
    one = bench()
    await ready(one, 24)
    for name in names:
        fetcher = described(one, name)
    assert fetched(fetcher, PROMPT, "ann")[0] == Fetched(12, 12)
    assert fetched(fetcher, PROMPT, "")[0] == fetched(fetcher, PROMPT, "eve")[0] == Fetched()
    core = one.node.core
    await one.until(lambda: len(core.namespaces[core.find_namespace(names[0])].index) == 12)
    assert core.find_namespace(names[1]) < 0


async def test_an_engine_with_adapters_is_meant_by_its_own_name_alone(bench: Callable[..., Administered]) -> None:
    one, keys = bench(), keys_of(IDENTITY)
    await stored(one, keys)
    one.forget()
    fetcher = described(one, serves="base")
    assert fetched(fetcher, PROMPT, model="an adapter")[0] == Fetched()
    assert fetched(fetcher, PROMPT, model="base")[0] == Fetched(12, 12)
    await one.until(lambda: one.present(keys) == 12)


async def test_what_is_described_bounds_no_work_but_the_node_does(bench: Callable[..., Administered]) -> None:
    one = bench()
    for number in range(4):
        fetcher = described(one, f"t/n/{number}/0.0", chunk_tokens="1", page_shards="1", window="1")
    tokens = list(range(MAX_KEYS // 2 + 1))
    found, steps = fetched(fetcher, tokens)
    assert found.pages == 2, "the last page of each of two"
    assert steps == MAX_KEYS // 256


async def test_layouts_of_large_chunks_make_no_more_work(
    bench: Callable[..., Administered], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = PromptFetcher((one := bench()).node.core, one.tier_manager)
    for number in range(5):
        described(one, f"t/m/{number}/0.0", page_shards="1")
    assert fetched(fetcher, PROMPT) == (Fetched(30, 0), 5)
    monkeypatch.setattr(prompts, "MOST_TOKENS", 13 * CHUNK)
    assert fetched(fetcher, PROMPT)[0] == Fetched(13, 0), "two of them in full, and a chunk of the third"
    monkeypatch.setattr(prompts, "STEP_TOKENS", CHUNK)
    assert fetched(fetcher, PROMPT) == (Fetched(13, 0), 13)
