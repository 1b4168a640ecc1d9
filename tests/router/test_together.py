"""SGLang's hand-off in front of stub engines: both are asked at once, and one's failure is no half answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ems.errors import ConfigError
from ems.router.fleet import Role
from ems.router.metrics import Prefill
from tests.router.fakes import ANSWER, FakeEngine, Handler, Running, completion, dead_address, running, status, until
from tests.router.kthena.manifests import ROUTE, SGLANG, documents, pod, read

BODY = {"model": "kimi-k25", "prompt": "hello", "max_tokens": 5}


class Meeting:
    """Where a stub decode waits until its prefill has come under the same number, as SGLang's do."""

    def __init__(self) -> None:
        self._rooms: dict[int, asyncio.Event] = {}

    def room(self, body: bytes) -> asyncio.Event:
        return self._rooms.setdefault(json.loads(body)["bootstrap_room"], asyncio.Event())

    async def prefill(self, request: web.Request, body: bytes) -> web.StreamResponse:
        self.room(body).set()
        return await completion(request, body)

    async def decode(self, request: web.Request, body: bytes) -> web.StreamResponse:
        await self.room(body).wait()
        return await completion(request, body)


@asynccontextmanager
async def serving(
    folder: Path, prefills: list[FakeEngine], decodes: list[FakeEngine], retries: int = 3
) -> AsyncIterator[Running]:
    pods = [pod(f"p{place}", "prefill", one.address.port) for place, one in enumerate(prefills)]
    pods += [pod(f"d{place}", "decode", one.address.port) for place, one in enumerate(decodes)]
    retry = f"trafficPolicy:\n    retry: {{attempts: {retries}, retryInterval: 1ms}}"
    (folder / "all.yaml").write_text(documents(SGLANG.replace("trafficPolicy:", retry), ROUTE, *pods))
    async with running(manifests=folder) as router:
        yield router


async def forever(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def after(event: asyncio.Event, then: Handler) -> Handler:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        await event.wait()
        return await then(request, body)

    return answer


def once(first: Handler, then: Handler) -> Handler:
    answers = iter([first])

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return await next(answers, then)(request, body)

    return answer


def streaming(ends: asyncio.Event) -> Handler:
    """A stream that begins at once, and ends when something has come about."""

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":"a"}]}\n\n')
        await ends.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


async def test_both_are_asked_at_once_and_meet_under_one_number(tmp_path: Path) -> None:
    meeting = Meeting()
    async with FakeEngine(meeting.prefill) as prefill, FakeEngine(meeting.decode) as decode:
        pods = [pod("p", "prefill", prefill.address.port), pod("d", "decode", decode.address.port)]
        pods[0] = pods[0].replace("annotations: {", 'annotations: {ems.router/bootstrap-port: "9100", ')
        (tmp_path / "all.yaml").write_text(documents(SGLANG, ROUTE, *pods))
        async with running(manifests=tmp_path) as router:
            for _ in range(2):
                response = await router.post(json={**BODY, "stream_options": {}})

                assert (response.status, await response.read()) == (200, ANSWER)

    rooms = []
    for asked, answered in zip(prefill.seen, decode.seen, strict=True):
        rooms.append(asked.json["bootstrap_room"])
        ours = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9100, "bootstrap_room": rooms[-1]}

        assert answered.json == {**BODY, "model": "kimi_k25", "stream_options": {}, **ours}
        assert asked.json == {**BODY, "model": "kimi_k25", "max_tokens": 1, "stream": False, **ours}
        assert asked.headers["X-Request-Id"] == answered.headers["X-Request-Id"]
    assert len(set(rooms)) == 2


async def test_a_prefill_that_fails_ends_its_decode_and_another_pair_is_asked_under_another_number(
    tmp_path: Path,
) -> None:
    meeting = Meeting()
    async with FakeEngine(meeting.decode) as decode, FakeEngine() as prefill:
        prefill.answer = once(after(decode.arrived, status(503)), meeting.prefill)
        async with serving(tmp_path, [prefill], [decode]) as router:
            response = await router.post(json=BODY)

            assert (response.status, await response.read()) == (200, ANSWER)
            assert router.router.counters.retries == {Role.PREFILL: 1, Role.DECODE: 1}
            assert [one.failures for one in router.instances()] == [1, 0]
        await asyncio.wait_for(decode.abandoned.wait(), 20)

    first, second = (one.json["bootstrap_room"] for one in decode.seen)

    assert first != second


async def test_a_decode_that_fails_ends_its_prefill_and_another_pair_is_asked(tmp_path: Path) -> None:
    """Also where it says so itself: it may have learned of its prefill's failure before the router."""
    meeting = Meeting()
    async with FakeEngine(once(forever, meeting.prefill)) as prefill, FakeEngine() as decode:
        decode.answer = once(after(prefill.arrived, status(500)), meeting.decode)
        async with serving(tmp_path, [prefill], [decode]) as router:
            response = await router.post(json=BODY)

            assert (response.status, await response.read()) == (200, ANSWER)
        await asyncio.wait_for(prefill.abandoned.wait(), 20)


async def test_a_decodes_error_after_its_prefill_is_the_answer(tmp_path: Path) -> None:
    done = asyncio.Event()
    async with FakeEngine() as prefill, FakeEngine(after(done, status(500))) as decode:
        async with serving(tmp_path, [prefill], [decode]) as router:
            asking = asyncio.create_task(router.post(json=BODY))
            await until(lambda: router.router.counters.prefills[Prefill.DONE] == 1)
            done.set()

            assert (await asking).status == 500
        assert len(decode.seen) == 1


async def test_the_clients_fault_is_the_prefills_answer(tmp_path: Path) -> None:
    async with FakeEngine(forever) as decode, FakeEngine(after(decode.arrived, status(400, b"why"))) as prefill:
        async with serving(tmp_path, [prefill], [decode]) as router:
            response = await router.post(json=BODY)

            assert (response.status, await response.read()) == (400, b"why")
        await asyncio.wait_for(decode.abandoned.wait(), 20)


async def test_pairs_that_all_fail_are_no_answer(tmp_path: Path) -> None:
    async with FakeEngine(status(503)) as prefill, FakeEngine(forever) as decode:
        async with serving(tmp_path, [prefill], [decode], retries=2) as router:
            response = await router.post(json=BODY)
            error = json.loads(await response.read())["error"]

            assert (response.status, error["code"]) == (503, "no_prefill_server")
        assert len(prefill.seen) == 3


async def test_a_decode_alone_is_not_asked(tmp_path: Path) -> None:
    async with FakeEngine() as decode:
        async with serving(tmp_path, [], [decode]) as router:
            assert (await router.post(json=BODY)).status == 503
            assert (await router.post("/v1/embeddings", json={"model": "kimi-k25", "input": "a"})).status == 200
        assert [one.path for one in decode.seen] == ["/v1/embeddings"]


async def test_an_answer_is_complete_whether_or_not_its_prefill_says_so(tmp_path: Path) -> None:
    async with FakeEngine(forever) as prefill, FakeEngine(streaming(prefill.arrived)) as decode:
        async with serving(tmp_path, [prefill], [decode]) as router:
            response = await router.post(json={**BODY, "stream": True})

            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(prefill.abandoned.wait(), 20)


@pytest.mark.parametrize("code", [500, 422])
async def test_a_prefill_that_fails_after_the_first_byte_is_an_error_event(tmp_path: Path, code: int) -> None:
    begun = asyncio.Event()

    async with FakeEngine(after(begun, status(code))) as prefill, FakeEngine(streaming(asyncio.Event())) as decode:
        async with serving(tmp_path, [prefill], [decode]) as router:
            async with router.client.post(router.url("/v1/completions"), json={**BODY, "stream": True}) as response:
                event = await response.content.readuntil(b"\n\n")
                begun.set()
                rest = await response.content.read()

            assert b'"text":"a"' in event
            assert b'"code":"upstream_broken"' in rest
            assert rest.endswith(b"data: [DONE]\n\n")
            assert router.router.counters.breaks == 1
        await asyncio.wait_for(decode.abandoned.wait(), 20)
        assert len(prefill.seen) == 1


async def test_a_client_that_leaves_is_gone_at_both(tmp_path: Path) -> None:
    async with (
        FakeEngine(forever) as prefill,
        FakeEngine(forever) as decode,
        serving(tmp_path, [prefill], [decode]) as router,
    ):
        asking = asyncio.create_task(router.post(json=BODY))
        await prefill.arrived.wait()
        await decode.arrived.wait()
        asking.cancel()
        for engine in (prefill, decode):
            await asyncio.wait_for(engine.abandoned.wait(), 20)


async def test_engines_that_cannot_be_reached_give_way_to_others(tmp_path: Path) -> None:
    meeting = Meeting()
    async with FakeEngine(meeting.prefill) as prefill, FakeEngine(meeting.decode) as decode:
        gone: list[Any] = [FakeEngine(), FakeEngine()]
        for one in gone:
            one.address = dead_address()
        async with serving(tmp_path, [gone[0], prefill], [gone[1], decode]) as router:
            for _ in range(6):
                assert (await router.post(json=BODY)).status == 200


@pytest.mark.parametrize("value", ["0", "70000", "http"])
def test_a_bootstrap_port_is_a_port(value: str) -> None:
    text = pod("p", "prefill", 1).replace("annotations: {", f'annotations: {{ems.router/bootstrap-port: "{value}", ')
    with pytest.raises(ConfigError, match=r"bootstrap-port is .*, expected a port from 1 to 65535"):
        read({"a.yaml": text})


async def test_sglang_without_pairs_is_balanced_over(tmp_path: Path) -> None:
    alone = SGLANG[: SGLANG.index("    pdGroup:")] + SGLANG[SGLANG.index("  workloadPort:") :]
    async with FakeEngine() as engine:
        (tmp_path / "all.yaml").write_text(documents(alone, ROUTE, pod("d", "decode", engine.address.port)))
        async with running(manifests=tmp_path) as router:
            assert (await router.post(json=BODY)).status == 200

    assert engine.seen[0].json == {**BODY, "model": "kimi_k25"}
