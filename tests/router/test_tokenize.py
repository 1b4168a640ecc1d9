"""A text is known by its tokens where an engine says these; nothing that it does instead fails a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ems.errors import ConfigError
from ems.router.admission.settings import AdmissionConfig
from ems.router.choosing import tokenizers
from ems.router.choosing.prefix_index import Place, block_hashes
from ems.router.choosing.tokenizers import SHORT
from ems.router.config import EventSource, RouterConfig
from ems.router.fleet import Role
from tests.router.fakes import FakeEngine, Handler, RawEngine, Running, completion, running, status, until
from tests.router.kthena.manifests import ROUTE, SERVER, documents, pod

BLOCK = 64
TEXT = "one two three four five six seven eight nine ten " * 40
IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b"}}
NOBODY = EventSource("tcp://127.0.0.1:1")


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rest ends within a test, however slow the machine is."""
    monkeypatch.setattr(tokenizers, "REST", 3600.0)


def ids_of(text: str) -> list[int]:
    return [1000 + byte for byte in text.encode()]


def rendered(asked: dict[str, Any]) -> str:
    return str(asked.get("prompt") or json.dumps(asked["messages"]))


async def tokenized(request: web.Request, body: bytes) -> web.StreamResponse:
    tokens = ids_of(rendered(json.loads(body)))
    return web.json_response({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})


async def hangs(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def speaking(tokenize: Handler = tokenized) -> Handler:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return await (tokenize if request.path == "/tokenize" else completion)(request, body)

    return answer


def asked_of(*engines: FakeEngine) -> list[Any]:
    """What the engines were asked to tokenize, in the order of the engines."""
    return [one.json for engine in engines for one in engine.seen if one.path == "/tokenize"]


def served(engine: FakeEngine) -> int:
    return sum(one.path != "/tokenize" for one in engine.seen)


def tell(router: Running, engine: FakeEngine, ids: Sequence[int]) -> None:
    """What an event of the engine would do: it has these tokens' blocks."""
    telling = [one for one in router.instances() if one.address == engine.address]
    names = block_hashes(ids, BLOCK, "")
    assert router.router.chooser.take_event(telling, BLOCK, Place.ENGINE, names, stored=True)


@asynccontextmanager
async def routed(
    tokenize: Handler = tokenized, *, told: bool = True, **settings: Any
) -> AsyncIterator[tuple[Running, FakeEngine, FakeEngine]]:
    """Two engines that tokenize so; the second one publishes events."""
    async with FakeEngine(speaking(tokenize)) as silent, FakeEngine(speaking(tokenize)) as telling:
        addresses = [silent.address, telling.address]
        settings = {"kv_events": {telling.address: NOBODY}, "tokenize_within": 30.0, **settings}
        async with running(decodes=addresses, **settings) as router:
            if told:
                tell(router, telling, [7] * BLOCK)
            yield router, silent, telling


async def decision(router: Running, **body: Any) -> Any:
    """Send a request, as a chat where it has messages; what is said of where it went."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = await router.post(path, json={"model": "m", **body})
    assert answer.status == 200
    found = await (await router.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()
    return found["choice"]


async def outcomes(router: Running) -> dict[str, float]:
    page = await (await router.get("/metrics")).text()
    name = "ems_router_tokenizations_total{outcome="
    lines = [line.removeprefix(name).split("} ") for line in page.splitlines() if line.startswith(name)]
    return {outcome.strip('"'): float(count) for outcome, count in lines}


@pytest.mark.parametrize(
    "prompt", [{"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}], ids=["text", "chat"]
)
async def test_a_text_goes_where_an_event_said_that_its_tokens_are(prompt: dict[str, Any]) -> None:
    async with routed() as (router, silent, telling):
        ids = ids_of(rendered(prompt))
        tell(router, telling, ids)
        for _ in range(2):  # going round would show
            choice = await decision(router, **prompt, max_tokens=3)

        assert (served(silent), served(telling)) == (0, 2)
        assert asked_of(silent, telling) == [{"model": "m", **prompt}] * 2
        assert choice["tokenized"]["outcome"] == "done"
        assert 0 <= choice["tokenized"]["seconds"] < 30
        assert choice["prefix_tokens"] == len(ids) // BLOCK * BLOCK
        assert await outcomes(router) == {"done": 2}


async def test_an_engine_that_says_no_tokens_any_more_gets_what_it_has_by_its_text() -> None:
    async with routed() as (router, silent, telling):
        await router.post(json={"model": "m", "prompt": TEXT})
        had = silent if served(silent) else telling
        for engine in (silent, telling):
            engine.answer = speaking(status(500))
        choice = await decision(router, prompt=TEXT + "more")

        assert served(had) == 2
        assert choice["tokenized"]["outcome"] == "failed"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "short"},
        {"prompt": list(range(200))},
        {"prompt": TEXT, "cache_salt": "s"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, IMAGE]}]},
    ],
    ids=["short", "ids", "salt", "image"],
)
async def test_nobody_is_asked_for_what_helps_nobody(body: dict[str, Any]) -> None:
    async with routed() as (router, silent, telling):
        assert (await decision(router, **body))["tokenized"] is None
        assert asked_of(silent, telling) == []


@pytest.mark.parametrize("settings", [{"told": False}, {"tokenize_within": 0.0}])
async def test_nobody_is_asked_without_events_or_when_it_is_not_wanted(settings: dict[str, Any]) -> None:
    async with routed(**settings) as (router, silent, telling):
        assert (await decision(router, prompt=TEXT))["tokenized"] is None
        assert asked_of(silent, telling) == []


async def test_nobody_is_asked_where_there_is_no_choice() -> None:
    async with routed() as (router, silent, _telling):
        router.router.fleet.remove(Role.DECODE, silent.address)

        assert (await decision(router, prompt=TEXT))["tokenized"] is None


async def test_what_reads_a_prompt_only_asks_nobody() -> None:
    async with routed() as (router, silent, telling):
        await router.post("/v1/embeddings", json={"model": "m", "input": TEXT})
        await router.post("/tokenize", json={"model": "m", "prompt": TEXT})

        assert len(silent.seen) + len(telling.seen) == 2


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def large(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(body=b"[" + b"1," * (4 << 20) + b"1]")


async def nonsense(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"tokens": [-1]})


@pytest.mark.parametrize(
    ("tokenize", "outcome"),
    [(status(404), "failed"), (status(500), "failed"), (nonsense, "failed"), (large, "broken")],
    ids=["404", "500", "nonsense", "large"],
)
async def test_an_engine_that_says_something_else_fails_no_request(tokenize: Handler, outcome: str) -> None:
    async with routed(tokenize) as (router, _silent, _telling):
        choice = await decision(router, prompt=TEXT)

        assert choice["tokenized"]["outcome"] == outcome
        assert not any(one.failures or one.breaker.doubted for one in router.instances())


async def test_an_engine_that_breaks_off_is_not_asked_again_at_once(long_rests: None) -> None:
    async with RawEngine(closes) as broken, FakeEngine(speaking()) as telling:
        settings: dict[str, Any] = {"kv_events": {telling.address: NOBODY}, "tokenize_within": 30.0}
        async with running([broken.address], [telling.address], prefill_above=1 << 20, **settings) as router:
            tell(router, telling, [7] * BLOCK)
            told = [(await decision(router, prompt=TEXT))["tokenized"] for _ in range(2)]

            assert [one["outcome"] for one in told] == ["broken", "done"]
            assert (broken.requests, router.instances()[0].failures) == (1, 0), "requests will find out by themselves"


async def test_who_is_late_with_a_long_prompt_is_asked_for_short_ones(long_rests: None) -> None:
    async def slow_with_much(request: web.Request, body: bytes) -> web.StreamResponse:
        return await (hangs if len(body) > SHORT else tokenized)(request, body)

    async with routed(slow_with_much, tokenize_within=0.2) as (router, _silent, _telling):
        long = TEXT * 200
        told = [(await decision(router, prompt=prompt))["tokenized"] for prompt in (long, long, long, TEXT)]
        assert [one and one["outcome"] for one in told] == ["late", "late", None, "done"]


async def test_an_engine_that_hangs_is_waited_for_as_long_as_was_said_and_then_rests(long_rests: None) -> None:
    async with routed(hangs, tokenize_within=0.01) as (router, silent, telling):
        late = [(await decision(router, prompt=TEXT))["tokenized"] for _ in range(3)]

        assert [one and one["outcome"] for one in late] == ["late", "late", None]
        assert late[0]["seconds"] >= 0.009
        assert all(engine.abandoned.is_set() for engine in (silent, telling))
        assert not any(one.failures or one.breaker.doubted for one in router.instances())


async def test_an_engine_that_was_put_aside_is_not_asked() -> None:
    async with routed() as (router, silent, telling), FakeEngine(speaking()) as third:
        router.router.fleet.add(Role.DECODE, third.address, 0.0, trusted=True)
        (first, *_) = router.instances()
        assert first.address == silent.address
        for _ in range(3):
            router.router.fleet.failed(first, asyncio.get_running_loop().time())
        for _ in range(3):
            await decision(router, prompt=TEXT)

        assert (len(asked_of(silent)), len(asked_of(telling, third))) == (0, 3)


async def test_a_client_that_leaves_takes_its_question_along() -> None:
    async with routed(hangs) as (router, silent, telling):
        body = json.dumps({"prompt": TEXT}).encode()
        _, writer = await asyncio.open_connection(*router.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await until(lambda: silent.arrived.is_set() or telling.arrived.is_set())
        writer.close()
        await until(lambda: silent.abandoned.is_set() or telling.abandoned.is_set())
        await router.idle()

        assert router.router.counters.disconnects == 1
        assert served(silent) + served(telling) == 0
        for engine in (silent, telling):
            engine.answer = speaking()
        for _ in range(2):
            assert (await decision(router, prompt=TEXT))["tokenized"]["outcome"] == "done", "nobody rests for it"


async def test_the_time_of_a_request_includes_it() -> None:
    async with routed(hangs, request_timeout=0.05) as (router, silent, telling):
        answer = await router.post(json={"model": "m", "prompt": TEXT})

        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "request_timeout")
        assert served(silent) + served(telling) == 0


async def test_an_engine_gets_the_credentials_that_it_gets_with_requests(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("engines")
    for admission, expected in (
        (AdmissionConfig(), "Bearer client"),
        (AdmissionConfig(engine_key=str(path)), "Bearer engines"),
    ):
        async with routed(admission=admission) as (router, silent, telling):
            headers = {"Authorization": "Bearer client", "X-Request-Id": "r-7"}
            await router.post(json={"model": "m", "prompt": TEXT}, headers=headers)
            seen = silent.seen + telling.seen

            assert {one.path for one in seen} == {"/tokenize", "/v1/completions"}
            assert {one.headers["Authorization"] for one in seen} == {expected}
            assert {one.headers["X-Request-Id"] for one in seen} == {"r-7"}


async def test_engines_of_the_model_are_asked_under_its_name_there_if_they_told(tmp_path: Path) -> None:
    async with FakeEngine(speaking()) as one, FakeEngine(speaking()) as two, FakeEngine(speaking()) as others:
        pods = [pod("p", "prefill", one.address.port), pod("d", "decode", two.address.port)]
        more = [
            pod(f"{role}-2", role, others.address.port).replace("kimi-k25-pd", "glm") for role in ("prefill", "decode")
        ]
        glm = [text.replace("kimi-k25", "glm").replace("glm-pd", "glm") for text in (SERVER, ROUTE)]
        (tmp_path / "all.yaml").write_text(documents(SERVER, ROUTE, *pods, *glm, *more))
        settings: dict[str, Any] = {"kv_events": {one.address: NOBODY}, "tokenize_within": 30.0}
        async with running(manifests=tmp_path, **settings) as router:
            tell(router, one, [7] * BLOCK)
            for model in ("kimi-k25", "glm"):
                assert (await router.post(json={"model": model, "prompt": TEXT})).status == 200

    assert asked_of(one, two) == [{"model": "kimi_k25", "prompt": TEXT}]
    assert (asked_of(others), served(others)) == ([], 2)


def test_it_takes_kv_events_and_a_time() -> None:
    some = {"decodes": (FakeEngine().address,)}
    with pytest.raises(ConfigError, match="add --kv-events"):
        RouterConfig(**some, tokenize_within=0.1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--tokenize-within -1 is no time"):
        RouterConfig(**some, tokenize_within=-1, kv_events={FakeEngine().address: NOBODY})  # type: ignore[arg-type]
