"""Streams: every byte as it was, every piece as soon as it is there, and an end that clients understand."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientPayloadError, web

from ems.router.fleet import Role
from tests.router.fakes import FakeEngine, RawEngine, Running, prefilled, running, until

if TYPE_CHECKING:
    from tests.router.fakes import Script

EVENTS = (
    b'data: {"id":"c","choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"c","choices":[{"delta":{"content":"caf\xc3\xa9 \\u2028"}}]}\n\n',
    b": a comment\r\n\r\ndata: {}\n\n",
    b"data: [DONE]\n\n",
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


async def read_rest(router: Running) -> tuple[bytes, bytes]:
    """Post a streaming request; return the answer's content type and all bytes of its body."""
    response = await router.post(json={"model": "m", "prompt": "p", "stream": True})
    return response.headers["Content-Type"].encode(), await response.read()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
async def test_a_stream_is_byte_exact_however_it_is_cut(size: int) -> None:
    whole = b"".join(EVENTS)

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for start in range(0, len(whole), size):
            writer.write(chunk(whole[start : start + size]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with (
        FakeEngine(prefilled) as prefill,
        RawEngine(script) as decode,
        running([prefill.address], [decode.address]) as router,
    ):
        assert (b"text/event-stream; charset=utf-8", whole) == await read_rest(router)


async def test_each_piece_arrives_before_the_next_one_is_made() -> None:
    """Nothing is held back: the engine goes on only after the client has seen what was sent."""
    go_on = asyncio.Event()

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in EVENTS:
            for part in (event[:5], event[5:]):
                await response.write(part)
                await go_on.wait()
                go_on.clear()
        return response

    async with (
        FakeEngine(answer) as decode,
        running(decodes=[decode.address]) as router,
        asyncio.timeout(30),
        router.client.post(router.url("/v1/chat/completions"), json={"stream": True}) as response,
    ):
        for event in EVENTS:
            for part in (event[:5], event[5:]):
                assert part == await response.content.readany()
                go_on.set()

        assert await response.content.readany() == b""


async def test_event_streams_tell_proxies_not_to_keep_them() -> None:
    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(body=b"data: [DONE]\n\n", headers={"Content-Type": "text/event-stream", **extra})

    extra: dict[str, str] = {}
    async with FakeEngine(answer) as decode, running(decodes=[decode.address]) as router:
        plain = await router.post()
        extra["Cache-Control"] = "no-store"
        own = await router.post()

    assert (plain.headers["Cache-Control"], plain.headers["X-Accel-Buffering"]) == ("no-cache", "no")
    assert own.headers.getall("Cache-Control") == ["no-store"]


async def test_other_answers_are_left_alone() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        response = await router.post()

    assert "Cache-Control" not in response.headers
    assert "X-Accel-Buffering" not in response.headers
    assert "Transfer-Encoding" not in response.headers


def cut_after(*pieces: bytes, head: bytes = STREAM_HEAD) -> tuple[Script, asyncio.Event]:
    """Return a script that sends pieces and then, once told to, breaks the connection."""
    cut = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for piece in pieces:
            writer.write(chunk(piece) if b"chunked" in head else piece)
        await writer.drain()
        await cut.wait()

    return script, cut


ERROR_END = (
    b'data: {"error":{"message":"The decode server broke off; send the request again","type":"server_error",'
    b'"param":null,"code":"upstream_broken"}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize(
    ("pieces", "gap"),
    [
        ((EVENTS[0],), b""),
        ((EVENTS[0], EVENTS[1][:20]), b"\n\n"),
        ((EVENTS[0][:-1],), b"\n\n"),
        ((b"data: {}\r\n\r\n",), b""),
    ],
    ids=["between events", "amid an event", "before an event's last byte", "with carriage returns"],
)
async def test_a_broken_stream_ends_with_an_error_event(pieces: tuple[bytes, ...], gap: bytes) -> None:
    script, cut = cut_after(*pieces)
    async with RawEngine(script) as decode, running(decodes=[decode.address]) as router, asyncio.timeout(30):
        async with router.client.post(router.url("/v1/completions"), json={"stream": True}) as response:
            sent = b"".join(pieces)

            assert sent == await response.content.readexactly(len(sent))

            cut.set()

            assert gap + ERROR_END == await response.content.read()

        assert router.router.counters.breaks == 1
        assert decode.requests == 1, "no second answer may be appended"
        assert router.router.fleet.listed(Role.DECODE)[0].failures == 1


async def test_a_broken_answer_that_is_no_stream_stays_visibly_incomplete() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    script, cut = cut_after(b'{"id":', head=head)
    async with (
        RawEngine(script) as decode,
        running(decodes=[decode.address]) as router,
        asyncio.timeout(30),
        router.client.post(router.url("/v1/completions"), json={}) as response,
    ):
        assert await response.content.readexactly(6) == b'{"id":'

        cut.set()
        with pytest.raises(ClientPayloadError):
            await response.content.read()


async def test_a_broken_compressed_stream_gets_no_event_in_plain_text() -> None:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    piece = gzip.compress(EVENTS[0])
    script, cut = cut_after(piece, head=head)
    async with (
        RawEngine(script) as decode,
        running(decodes=[decode.address]) as router,
        asyncio.timeout(30),
        router.client.post(router.url("/v1/completions"), json={}) as response,
    ):
        assert piece == await response.content.readexactly(len(piece))

        cut.set()
        with pytest.raises(ClientPayloadError):
            await response.content.read()


async def test_an_error_event_of_the_engine_crosses_as_it_is() -> None:
    whole = b'data: {"error":{"message":"x","code":400}}\n\ndata: [DONE]\n\n'

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(whole) + b"0\r\n\r\n")
        await writer.drain()

    async with RawEngine(script) as decode, running(decodes=[decode.address]) as router:
        assert whole == (await read_rest(router))[1]
        assert not router.router.counters.breaks


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(EVENTS[0])
        await writer.drain()

    async with RawEngine(script) as decode, running(decodes=[decode.address]) as router:
        assert EVENTS[0] == (await read_rest(router))[1]


async def test_a_silent_stream_is_given_up() -> None:
    script, cut = cut_after(EVENTS[0])
    async with RawEngine(script) as decode, running(decodes=[decode.address], idle_timeout=0.1) as router:
        _, body = await read_rest(router)
        cut.set()

    head, _, rest = body.partition(b"data: " + b'{"error"')

    assert EVENTS[0] == head
    assert b'"code":"decode_timeout"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_stops_reading_is_given_up_and_the_engine_told() -> None:
    """Back-pressure reaches the engine, and ends: the time without movement counts for the client, too."""
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        try:
            while True:
                writer.write(chunk(b"data: " + b"x" * 65536 + b"\n\n"))
                await writer.drain()
        except ConnectionError:
            gone.set()

    async with RawEngine(script) as decode, running(decodes=[decode.address], idle_timeout=0.3) as router:
        _reader, writer = await asyncio.open_connection(*router.address, limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        await asyncio.wait_for(gone.wait(), 20)
        writer.transport.abort()
        await until(lambda: not router.router.counters.running)

        assert not router.router.fleet.listed(Role.DECODE)[0].failures, "the engine is not to blame"
