"""Instances that are dead, ill, slow or talk nonsense: another one takes over, or the client gets a clear error."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from ems.router.fleet import Role
from ems.router.metrics import Prefill
from tests.router.fakes import (
    ANSWER,
    FakeEngine,
    RawEngine,
    Running,
    completion,
    dead_address,
    prefilled,
    running,
    status,
    until,
)

if TYPE_CHECKING:
    from tests.router.fakes import Handler, Script


def sends(raw: bytes) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return script


async def never(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def settled(router: Running) -> None:
    """Wait until the probes of the start are over."""
    await until(lambda: all(one.breaker.probe_at is None or not one.breaker.usable for one in router.instances()))
    await until(lambda: not any(one.breaker.probing for one in router.instances()))


# ------------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("code", [500, 502, 503, 429, 408, 302])
async def test_a_prefill_that_cannot_is_replaced_by_another(code: int) -> None:
    async with FakeEngine(status(code)) as ill, FakeEngine(prefilled) as well, FakeEngine() as decode:
        async with running([ill.address, well.address], [decode.address]) as router:
            response = await router.post()

            assert (response.status, await response.read()) == (200, ANSWER)
            assert router.router.counters.retries[Role.PREFILL] == 1
        assert (len(ill.seen), len(well.seen), len(decode.seen)) == (1, 1, 1)
        assert "kv_transfer_params" in decode.seen[0].json


async def test_an_unreachable_prefill_is_replaced_by_another() -> None:
    async with FakeEngine(prefilled) as well, FakeEngine() as decode:
        async with running([dead_address(), well.address], [decode.address]) as router:
            for _ in range(6):
                assert (await router.post()).status == 200
        assert 6 == len(well.seen) == len(decode.seen)


@pytest.mark.parametrize("code", [500, 503, 429])
async def test_without_any_able_prefill_decode_does_it_all(code: int) -> None:
    """Prefill only accelerates: its failure is no failure of the request."""
    async with FakeEngine(status(code)) as ill, FakeEngine() as decode:
        async with running([ill.address, dead_address()], [decode.address], max_retries=1) as router:
            response = await router.post(json={"model": "m", "prompt": "p"})

            assert (response.status, await response.read()) == (200, ANSWER)
            assert router.router.counters.prefills[Prefill.SKIPPED] == 1
        assert decode.seen[0].json == {"model": "m", "prompt": "p"}


async def test_retries_of_prefill_are_bounded() -> None:
    async with FakeEngine() as decode, RawEngine(sends(b"")) as broken:
        async with running([broken.address], [decode.address], max_retries=2) as router:
            await settled(router)

            assert (await router.post()).status == 200
        assert broken.requests == 3


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n[{}]",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}",
        b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\xff\x16\x03\x01" * 100,
        b"",
    ],
    ids=["text", "array", "empty", "short", "status 999", "ssh", "binary", "nothing"],
)
async def test_a_prefill_that_talks_nonsense_is_skipped(raw: bytes) -> None:
    async with (
        RawEngine(sends(raw)) as odd,
        FakeEngine() as decode,
        running([odd.address], [decode.address], max_retries=0) as router,
    ):
        response = await router.post()

        assert (response.status, await response.read()) == (200, ANSWER)
        assert router.router.fleet.listed(Role.PREFILL)[0].failures == 1


async def test_a_prefill_that_takes_too_long_is_left() -> None:
    async with FakeEngine(never) as slow, FakeEngine() as decode:
        async with running([slow.address], [decode.address], prefill_timeout=0.1) as router:
            assert (await router.post()).status == 200
            assert router.router.counters.prefills[Prefill.TIMED_OUT] == 1
            await asyncio.wait_for(slow.abandoned.wait(), 20)
        assert len(slow.seen) == 1, "the time is for the whole prefill, not for each attempt"


# -------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("code", [429, 502, 503])
async def test_a_decode_that_is_busy_is_replaced_and_the_last_ones_answer_is_the_answer(code: int) -> None:
    busy = status(code, b"busy")
    async with (
        FakeEngine(prefilled) as prefill,
        FakeEngine(busy) as one,
        FakeEngine(busy) as other,
        running([prefill.address], [one.address, other.address]) as router,
    ):
        response = await router.post()
        assert (response.status, await response.read()) == (code, b"busy")
        other.answer = completion
        assert [(await router.post()).status for _ in range(3)] == [200, 200, 200]
        await router.idle()
    assert len(prefill.seen) == 4


@pytest.mark.parametrize("code", [400, 404, 500, 504])
async def test_an_error_that_would_be_the_same_elsewhere_is_the_answer(code: int) -> None:
    async with (
        FakeEngine(status(code, b"no")) as one,
        FakeEngine(status(code, b"no")) as other,
        running([], [one.address, other.address]) as router,
    ):
        response = await router.post()
        assert (response.status, await response.read()) == (code, b"no")
    assert len(one.seen) + len(other.seen) == 1


async def test_an_unreachable_decode_is_replaced_by_another() -> None:
    async with FakeEngine(prefilled) as prefill, FakeEngine() as well:
        async with running([prefill.address], [dead_address(), well.address]) as router:
            for _ in range(6):
                assert (await router.post()).status == 200
        assert len(well.seen) == 6
        assert len(prefill.seen) == 6, "a retried decode needs no second prefill"
        assert all("kv_transfer_params" in seen.json for seen in well.seen)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n",
        b"garbage\r\n\r\n",
    ],
    ids=["closed", "only a stream's head", "only a head", "status 999", "garbage"],
)
async def test_a_decode_that_breaks_before_its_first_byte_is_replaced(raw: bytes) -> None:
    async with (
        RawEngine(sends(raw)) as broken,
        FakeEngine() as well,
        running(decodes=[broken.address, well.address]) as router,
    ):
        await settled(router)
        for _ in range(2):
            response = await router.post()

            assert (response.status, await response.read()) == (200, ANSWER)
        assert router.router.counters.retries[Role.DECODE] == 1


async def stored(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": {"ems_stored_tokens": 16}})


@pytest.mark.parametrize(
    ("raw", "prefill", "again"),
    [
        (b"", prefilled, False),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", prefilled, False),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", prefilled, True),
        (b"", stored, True),
    ],
    ids=["closed", "502", "503", "closed, by a pool"],
)
async def test_blocks_that_a_decode_may_have_fetched_are_not_named_to_another(
    raw: bytes, prefill: Handler, again: bool
) -> None:
    async with (
        FakeEngine(prefill) as prefilling,
        RawEngine(sends(raw)) as broken,
        FakeEngine() as well,
        running([prefilling.address], [broken.address, well.address]) as router,
    ):
        await settled(router)
        for _ in range(2):
            assert (await router.post()).status == 200

        retried = sum("kv_transfer_params" in seen.json for seen in well.seen)
        assert (broken.requests, len(well.seen), len(prefilling.seen)) == (1, 2, 2)
        assert retried == 1 + again


async def test_all_decodes_dead_is_a_503_in_openais_form() -> None:
    async with FakeEngine(prefilled) as prefill, running([prefill.address], [dead_address(), dead_address()]) as router:
        response = await router.post(headers={"X-Request-Id": "r"})
        error = json.loads(await response.read())["error"]

        assert response.status == 503
        assert {"message", "type", "param", "code"} == error.keys()
        assert (error["type"], error["code"]) == ("service_unavailable_error", "no_decode_server")
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["X-Request-Id"] == "r"
        assert response.headers["Content-Type"] == "application/json"

        for _ in range(3):
            assert (await router.post()).status == 503
        await until(lambda: not router.router.fleet.usable(Role.DECODE))
        before = len(prefill.seen)

        assert (await router.post()).status == 503
        assert before == len(prefill.seen), "nothing is prefilled that nobody can decode"


async def test_a_decode_that_never_answers_is_a_504() -> None:
    async with FakeEngine(never) as silent, running(decodes=[silent.address], idle_timeout=0.1) as router:
        response = await router.post()

        assert response.status == 504
        assert json.loads(await response.read())["error"]["code"] == "decode_timeout"
        await asyncio.wait_for(silent.abandoned.wait(), 20)


async def test_an_instance_that_fails_fast_does_not_draw_the_requests() -> None:
    """It is idle all the time, so by load alone it would get every request."""
    release = asyncio.Event()

    async def hold(request: web.Request, body: bytes) -> web.StreamResponse:
        await release.wait()
        return await completion(request, body)

    async with (
        FakeEngine(status(500)) as ill,
        FakeEngine(hold) as well,
        running(decodes=[ill.address, well.address]) as router,
    ):
        await settled(router)
        tasks = [asyncio.create_task(router.post()) for _ in range(20)]
        await until(lambda: len(ill.seen) + len(well.seen) == 20)
        await until(lambda: any(task.done() for task in tasks))
        tasks += [asyncio.create_task(router.post()) for _ in range(20)]
        await until(lambda: len(ill.seen) + len(well.seen) == 40)
        release.set()
        answers = await asyncio.gather(*tasks)

        assert len(ill.seen) == [answer.status for answer in answers].count(500) <= 20


async def test_a_host_without_a_route_is_bounded_by_the_connect_timeout() -> None:
    """A listener that accepts nothing, with a full queue, is as good as a host that drops packets."""
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        address = dead_address()._replace(port=deaf.getsockname()[1])
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        try:
            async with FakeEngine() as well, running(decodes=[address, well.address], connect_timeout=0.2) as router:
                for _ in range(2):
                    assert (await router.post()).status == 200
        finally:
            for filler in fillers:
                filler.close()


# ------------------------------------------------------------------------------------------------------ circuit breaker


async def test_a_failing_instance_is_put_aside_and_comes_back_after_a_probe() -> None:
    async with FakeEngine() as well, FakeEngine() as ill:
        ill.health = 500
        async with running(decodes=[ill.address, well.address]) as router:
            await until(lambda: len(router.router.fleet.usable(Role.DECODE)) == 1)
            for _ in range(4):
                await router.post()

            assert (len(ill.seen), len(well.seen)) == (0, 4)

            ill.health = 200
            await until(lambda: len(router.router.fleet.usable(Role.DECODE)) == 2)
            for _ in range(4):
                await router.post()

            assert len(ill.seen) >= 2


async def test_server_errors_make_the_router_ask_for_health() -> None:
    """A sick request must not put instances aside, a sick engine must: its health page decides."""
    async with FakeEngine(status(500)) as ill, running(decodes=[ill.address]) as router:
        await settled(router)
        probes = ill.probes
        for _ in range(5):
            assert (await router.post()).status == 500
        await until(lambda: ill.probes > probes)
        await settled(router)

        assert router.router.fleet.usable(Role.DECODE)

        ill.health = 503

        assert (await router.post()).status == 500
        await until(lambda: not router.router.fleet.usable(Role.DECODE))

        assert (await router.post()).status == 503


async def test_an_engine_that_starts_after_the_router_is_found() -> None:
    address = dead_address()
    async with running(decodes=[address]) as router:
        await until(lambda: not router.router.fleet.usable(Role.DECODE))

        assert (await router.get("/readyz")).status == 503

        async def answer(request: web.Request) -> web.StreamResponse:
            return await completion(request, b"")

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, *address).start()
        await until(lambda: bool(router.router.fleet.usable(Role.DECODE)))

        assert (await router.get("/readyz")).status == 200, "a server without a health page counts as alive"
        assert (await router.post()).status == 200
        await runner.cleanup()
