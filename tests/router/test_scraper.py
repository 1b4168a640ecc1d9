"""A router that reads its engines' figures, because plugins of its configuration go by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ems.router.choosing.figures import FRESH
from ems.router.choosing.kthena import Measured
from tests.engines.engine_pages import sglang, vllm
from tests.router.fakes import FakeEngine, Running, running, until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.router.scraper.INTERVAL", 0.005)
    monkeypatch.setattr("ems.files.POLL_SECONDS", 0.005)


def scores(*names: str) -> str:
    return f"Score: {{enabled: [{', '.join(f'{{name: {name}, weight: 1}}' for name in names)}]}}"


@asynccontextmanager
async def choosing(folder: Path, plugins: str, *engines: FakeEngine) -> AsyncIterator[Running]:
    path = folder / "routerConfiguration.yaml"
    path.write_text(f"scheduler: {{plugins: {{{plugins}}}}}")
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        yield await stack.enter_async_context(running(decodes=[engine.address for engine in engines], router_file=path))


def measured(router: Running) -> list[Measured]:
    now = asyncio.get_running_loop().time()
    return [one.figures.measured(one.running, 0.0, now) for one in router.instances()]


def served(*engines: FakeEngine) -> list[int]:
    return [sum(one.path.startswith("/v1/completions") for one in engine.seen) for engine in engines]


@pytest.mark.parametrize(
    ("plugin", "better", "worse"),
    [
        ("gpu-usage", vllm(kv_usage=0.1), vllm(kv_usage=0.9)),
        ("gpu-usage", sglang(kv_usage=0.1), vllm(kv_usage=0.9)),
        ("least-latency", vllm(ttft=(1, 10), tpot=(1, 100)), vllm(ttft=(9, 10), tpot=(9, 100))),
        ("least-latency", sglang(ttft=(1, 10), tpot=(1, 100)), vllm(ttft=(9, 10), tpot=(9, 100))),
    ],
)
async def test_all_go_to_the_engine_whose_figures_are_better(
    tmp_path: Path, plugin: str, better: bytes, worse: bytes
) -> None:
    one, two = FakeEngine(), FakeEngine()
    one.metrics, two.metrics = worse, better
    async with choosing(tmp_path, scores(plugin), one, two) as router:
        await until(lambda: all((seen.kv_usage, seen.ttft) != (None, None) for seen in measured(router)))
        for _ in range(10):
            await router.post()
        assert served(one, two) == [0, 10]


async def test_an_engine_where_too_many_wait_gets_nothing(tmp_path: Path) -> None:
    one, two = FakeEngine(), FakeEngine()
    one.metrics, two.metrics = vllm(waiting=10), vllm(waiting=9)
    plugins = f"Filter: {{enabled: [least-request]}}, {scores('prefix-cache')}"
    async with choosing(tmp_path, plugins, one, two) as router:
        await until(lambda: [seen.waiting for seen in measured(router)] == [10, 9])
        for _ in range(5):
            await router.post()
        assert served(one, two) == [0, 5]
        two.metrics = vllm(waiting=11)
        await until(lambda: [seen.waiting for seen in measured(router)] == [10, 11])
        assert (await router.post()).status == 503


async def test_an_adapter_goes_where_it_is_loaded(tmp_path: Path) -> None:
    one, two = FakeEngine(), FakeEngine(models=("m", "fine"))
    plugins = f"Filter: {{enabled: [lora-affinity]}}, {scores('random')}"
    async with choosing(tmp_path, plugins, one, two) as router:
        await until(lambda: all(seen.models for seen in measured(router)))
        for _ in range(10):
            await router.post(json={"model": "fine", "prompt": "a"})
        assert served(one, two) == [0, 10]
        assert (await router.post(json={"model": "nobodys", "prompt": "a"})).status == 503
        listed = await (await router.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["m", "fine"]
        one.models = ("m", "fine")
        two.models = ("m",)
        await until(lambda: ["fine" in seen.models for seen in measured(router)] == [True, False])
        await router.post(json={"model": "fine", "prompt": "a"})

    assert served(one, two) == [1, 10]
    assert not one.scrapes


async def test_nobody_is_asked_until_a_plugin_goes_by_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with choosing(tmp_path, scores("prefix-cache"), engine) as router:
        await router.post()
        assert not engine.scrapes
        (tmp_path / "routerConfiguration.yaml").write_text(f"scheduler: {{plugins: {{{scores('gpu-usage')}}}}}")
        await until(lambda: engine.scrapes > 1)


async def test_an_engine_without_figures_is_said_once_and_gets_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    async with choosing(tmp_path, scores("gpu-usage"), engine) as router:
        await until(lambda: engine.scrapes > 3)
        assert (await router.post()).status == 200
        engine.metrics = b"vllm:kv_cache_usage_perc 0.5\n" * 100_000
        asked = engine.scrapes
        await until(lambda: engine.scrapes > asked + 2)
        assert measured(router)[0].kv_usage is None, "the page is too large"
        engine.metrics = vllm(kv_usage=0.5)
        await until(lambda: measured(router)[0].kv_usage == 0.5)
        engine.metrics = None
        asked = engine.scrapes
        await until(lambda: engine.scrapes > asked + 3)
        assert measured(router)[0].kv_usage == 0.5, f"it counts for {FRESH} seconds"

    said = [one.getMessage() for one in caplog.records if "/metrics" in one.getMessage()]
    assert said == [f"/metrics of the decode instance {engine.address} is unknown: it answers 404"] * 2


async def test_a_slow_engine_is_not_asked_twice_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    slow, other = FakeEngine(), FakeEngine()

    async def wait(request: web.Request) -> web.Response:
        slow.scrapes += 1
        await go_on.wait()
        return web.Response(body=vllm(kv_usage=0.5))

    monkeypatch.setattr(slow, "_metrics", wait)
    async with choosing(tmp_path, scores("gpu-usage"), slow, other):
        await until(lambda: other.scrapes > 5)
        assert slow.scrapes == 1
        go_on.set()
        await until(lambda: slow.scrapes > 1)
