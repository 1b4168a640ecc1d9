"""Clients that leave: the engine is told at once, and nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from ems.router.app import CLIENT_LEFT
from tests.router.fakes import FakeEngine, Running, completion, running, until

if TYPE_CHECKING:
    from tests.router.fakes import Handler


async def never(request: web.Request, body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {}\n\n")
    await asyncio.Event().wait()
    return response


async def send_request(router: Running, body: bytes = b"{}", length: int | None = None) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*router.address)
    size = len(body) if length is None else length
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (size, body))
    await writer.drain()
    return writer


@pytest.mark.parametrize("answer", [never, endless])
async def test_a_client_that_leaves_during_decode_is_gone_upstream(answer: Handler) -> None:
    async with (
        FakeEngine() as prefill,
        FakeEngine(answer) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        writer = await send_request(router)
        await decode.arrived.wait()
        writer.close()
        await asyncio.wait_for(decode.abandoned.wait(), 20)
        await router.idle()

        assert router.router.counters.disconnects == 1
        assert not any(instance.failures for instance in router.instances()), "nobody failed"


async def test_a_client_that_leaves_during_prefill_is_gone_upstream() -> None:
    async with (
        FakeEngine(never) as prefill,
        FakeEngine() as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        writer = await send_request(router)
        await prefill.arrived.wait()
        writer.close()
        await asyncio.wait_for(prefill.abandoned.wait(), 20)
        await router.idle()

        assert not decode.seen
        assert router.router.counters.answered["/v1/completions", CLIENT_LEFT] == 1

        prefill.answer = completion

        assert (await router.post()).status == 200
        assert len(prefill.seen) == 2, "the instance does not look busy"


async def test_a_client_that_leaves_between_two_attempts_leaves_nothing() -> None:
    async def broken(request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with FakeEngine(broken) as decode, running(decodes=[decode.address], retry_delay=5) as router:
        writer = await send_request(router)
        await decode.arrived.wait()
        await until(lambda: bool(sum(router.router.counters.retries.values())))
        writer.close()
        await router.idle()

        assert router.router.counters.disconnects == 1


async def test_a_client_that_leaves_amid_its_body_leaves_nothing() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        writer = await send_request(router, b'{"model":', length=100)
        await until(lambda: len(router.server.connections) == 1)
        writer.close()
        await until(lambda: not router.server.connections)

        assert not decode.seen
        assert not router.router.counters.answered


async def test_many_leaving_clients_leave_nothing() -> None:
    async with (
        FakeEngine() as prefill,
        FakeEngine(endless) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        writers = [await send_request(router) for _ in range(50)]
        await until(lambda: len(decode.seen) == 50)
        for writer in writers:
            writer.close()
        await router.idle()

        assert router.router.counters.disconnects == 50
