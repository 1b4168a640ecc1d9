"""Connections to engines: kept while the engine allows it, never trusted to be open, closed when nobody waits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from ems.http.address import Address
from ems.http.client import Connection, Page, Receiver, Upstream, UpstreamBroken, request_of
from ems.http.message import Headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Engine:
    """Answers by a list of moves: bytes to send, or None to close without a word; closes after half a head."""

    def __init__(self, *moves: bytes | None) -> None:
        self.moves = list(moves)
        self.connections = 0
        self.requests = 0
        self.closes = False
        self.address = Address("127.0.0.1", 1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                move = self.moves.pop(0)
                if move is None:
                    return
                writer.write(move)
                await writer.drain()
                if self.closes or b"\r\n\r\n" not in move:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def talking(engine: Engine) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server, Upstream(1.0) as upstream, asyncio.timeout(20):
        yield upstream


async def get(upstream: Upstream, engine: Engine) -> Page:
    return await upstream.page("GET", engine.address, b"/", b"", limit=100)


async def test_a_connection_is_kept() -> None:
    engine = Engine(WHOLE, WHOLE, WHOLE)
    async with talking(engine) as upstream:
        for _ in range(3):
            assert (await get(upstream, engine)).body == b"ok"

    assert (engine.connections, engine.requests) == (1, 3)


async def test_a_kept_connection_that_was_closed_is_replaced_once() -> None:
    engine = Engine(WHOLE, None, WHOLE)
    async with talking(engine) as upstream:
        for _ in range(2):
            assert (await get(upstream, engine)).body == b"ok"

    assert (engine.connections, engine.requests) == (2, 3)


async def test_a_new_connection_that_is_closed_is_not_tried_again() -> None:
    engine = Engine(None, WHOLE)
    async with talking(engine) as upstream:
        with pytest.raises(UpstreamBroken):
            await get(upstream, engine)

    assert engine.requests == 1


async def test_a_kept_connection_that_answered_in_part_is_not_tried_again() -> None:
    engine = Engine(WHOLE, b"HTTP/1.1 200", WHOLE)
    async with talking(engine) as upstream:
        await get(upstream, engine)
        with pytest.raises(UpstreamBroken):
            await get(upstream, engine)

    assert engine.requests == 2


@pytest.mark.parametrize("more", [b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", b"garbage"])
async def test_what_comes_unasked_ends_the_connection_and_is_nobodys_answer(more: bytes) -> None:
    engine = Engine(WHOLE + more, WHOLE)
    async with talking(engine) as upstream:
        assert (await get(upstream, engine)).status == 200
        assert (await get(upstream, engine)).status == 200

    assert engine.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 101 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n" + b"z" * 101,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: " + b"y" * (1 << 20),
    ],
    ids=["two lengths", "unequal lengths", "another protocol", "head without end", "too large", "trailer without end"],
)
async def test_an_answer_that_cannot_be_trusted_is_none(answer: bytes) -> None:
    engine = Engine(answer)
    async with talking(engine) as upstream:
        with pytest.raises(UpstreamBroken):
            await get(upstream, engine)


async def test_an_answer_without_a_length_that_its_receiver_refuses_at_the_end_is_broken() -> None:
    class Picky(Receiver):
        def comes_from(self, connection: Connection) -> None: ...
        def head(self, status: int, headers: Headers) -> None: ...
        def piece(self, data: bytes) -> None: ...
        def end(self) -> None:
            raise UpstreamBroken("not all of it")

    engine = Engine(b"HTTP/1.1 200 OK\r\n\r\n{")
    async with talking(engine) as upstream:
        engine.closes = True
        with pytest.raises(UpstreamBroken, match="not all of it"):
            await upstream.send(engine.address, request_of("GET", engine.address, b"/", b""), Picky())


async def test_an_interim_answer_is_passed_over() -> None:
    engine = Engine(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WHOLE)
    async with talking(engine) as upstream:
        assert await get(upstream, engine) == Page(200, [(b"content-length", b"2")], b"ok")


async def test_a_call_that_is_cancelled_closes_its_connection() -> None:
    engine = Engine(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", WHOLE)
    async with talking(engine) as upstream:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await get(upstream, engine)

        assert (await get(upstream, engine)).body == b"ok"

    assert engine.connections == 2
