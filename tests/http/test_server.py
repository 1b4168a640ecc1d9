"""Connections of clients: one reading of each message, one answer for each request, in order, and an end to waiting."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from ems.http.server import HEAD_LIMIT, Connection, Server
from tests.router.fakes import ANSWER, FakeEngine, Running, dead_address, running, until

if TYPE_CHECKING:
    from aiohttp import web

    from ems.http.message import Refusal, Request
    from ems.http.reply import Reply

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
POST = HEAD + b"content-length: 2\r\n\r\n{}"


async def said(router: Running, *pieces: bytes, wait: bool = False) -> bytes:
    """Send pieces apart from each other; return all that comes until the router closes, or a little after with wait."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            return await reader.readuntil(ANSWER) if wait else await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 2\r\n",
        b"content-length: 2\r\ncontent-length: 2\r\n",
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2, 2\r\n",
        b"content-length: +2\r\n",
        b"content-length: 2\r\nx: a\r\n b\r\n",
        b"content-length:\r\n 2\r\n",
        b"content-length : 2\r\n",
        b"content-length: 2\r\nx: a\x00b\r\n",
        b"content-length: 2\r\nx: a\rb\r\n",
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 2\r\nhost: y\r\n",
    ],
)
async def test_what_two_readers_could_read_differently_is_refused(lines: bytes) -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        answer = await said(router, HEAD + lines + b"\r\n{}" + POST)

        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
        assert answer.count(b"x-request-id") == 1, "nothing that follows is taken for a request"
        assert b"connection: close" in answer
        assert not decode.seen


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/0.9\r\n\r\n",
        b"GET http://x/livez HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\nhost: x\n\n",
    ],
)
async def test_a_request_that_is_none_for_a_server_is_refused(request_: bytes) -> None:
    async with running(decodes=[dead_address()]) as router:
        answer = await said(router, request_ + b"")

        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async def echo(request: web.Request, body: bytes) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(body=json.loads(body)["prompt"].encode())

    def post(text: str, more: bytes = b"") -> bytes:
        body = json.dumps({"prompt": text}).encode()
        return HEAD + more + b"content-length: %d\r\n\r\n%b" % (len(body), body)

    async with FakeEngine(echo) as decode, running(decodes=[decode.address]) as router:
        answer = await said(
            router, post("<1>") + post("<2>")[:50], post("<2>")[50:] + post("<3>", b"connection: close\r\n")
        )

        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
        assert answer.index(b"<1>") < answer.index(b"<2>") < answer.index(b"<3>")


async def test_a_body_in_chunks_crosses_whole_and_trailers_mean_nothing() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        chunks = b'transfer-encoding: chunked\r\n\r\n1\r\n{\r\n8;x="y"\r\n"a": 12}\r\n0\r\nx-sum: 7\r\n\r\n'
        answer = await said(router, HEAD + chunks, wait=True)

        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert [seen.body for seen in decode.seen] == [b'{"a": 12}']
        assert "Transfer-Encoding" not in decode.seen[0].headers


async def test_a_client_that_asks_is_told_to_send_its_body() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address], max_body_bytes=10) as router:
        reader, writer = await asyncio.open_connection(*router.address)
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        async with asyncio.timeout(20):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"

            writer.write(b"{}")

            assert (await reader.readuntil(ANSWER)).startswith(b"HTTP/1.1 200 ")
        writer.close()

        refused = await said(router, HEAD + b"expect: 100-continue\r\ncontent-length: 20\r\n\r\n")

        assert refused.startswith(b"HTTP/1.1 413 "), "no body is asked for that would be refused"
        assert (await said(router, HEAD + b"expect: magic\r\ncontent-length: 2\r\n\r\n")).startswith(b"HTTP/1.1 417 ")


async def test_a_head_without_end_is_refused() -> None:
    async with running(decodes=[dead_address()]) as router:
        assert (await said(router, HEAD + b"x: " + b"y" * HEAD_LIMIT)).startswith(b"HTTP/1.1 431 ")


async def test_a_trailer_without_end_is_refused() -> None:
    async with running(decodes=[dead_address()]) as router:
        chunks = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"y" * (1 << 20)

        assert (await said(router, HEAD + chunks)).startswith(b"HTTP/1.1 431 ")


async def test_what_is_no_http_spoils_nothing_that_came_before() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        answer = await said(router, POST + POST + POST + b"?\r\n\r\n")

        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
        assert answer.count(b"connection: close") == 1, "the last answer says that it is the last"


class _Pipe(asyncio.Transport):
    """Keeps what is written; never closes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Site:
    """Answers each request with its path."""

    def admit(self, _: Request) -> int:
        return 0

    async def serve(self, request: Request, reply: Reply, _: Refusal | None) -> None:
        reply.whole(200, request.path.encode())


async def test_a_request_waits_until_the_answers_before_it_are_taken() -> None:
    pipe = _Pipe()
    connection = Connection(Server(_Site(), body_timeout=1.0))
    connection.connection_made(pipe)
    connection.pause_writing()
    connection.data_received(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(0)

    assert not pipe.written, "what nobody takes is not piled up"

    connection.resume_writing()
    await until(lambda: pipe.written.endswith(b"/2"))
    connection.connection_lost(None)

    assert pipe.written.count(b"HTTP/1.1 200 OK") == 2
    assert pipe.written.index(b"/1") < pipe.written.index(b"/2")


async def test_an_offer_of_another_protocol_is_passed_over() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        lines = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
        for body in (b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"):
            answer = await said(router, HEAD + lines + body, wait=True)

            assert answer.startswith(b"HTTP/1.1 200 ")
        assert [seen.body for seen in decode.seen] == [b"{}", b"{}"]
        assert "Upgrade" not in decode.seen[0].headers


async def test_http_1_0_gets_an_answer_without_chunks() -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async with FakeEngine(answer) as decode, running(decodes=[decode.address]) as router:
        whole = await said(router, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = whole.partition(b"\r\n\r\n")

        assert body == b"data: 1\n\ndata: [DONE]\n\n"
        assert b"chunked" not in head
        assert b"connection: close" in head


async def test_idle_connections_close_when_the_router_drains() -> None:
    async with FakeEngine() as decode, running(decodes=[decode.address]) as router:
        reader, writer = await asyncio.open_connection(*router.address)
        writer.write(POST)
        async with asyncio.timeout(20):
            await reader.readuntil(ANSWER)
            router.server.drain()

            assert await reader.read() == b""
        writer.close()
        await until(lambda: not router.server.connections)
