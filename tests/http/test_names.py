"""Names of engines: what becomes of a search whose caller has left, with the event loop that the router has."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest
import uvloop

from ems.http.address import Address
from ems.http.client import Upstream, UpstreamBroken

UNKNOWN = "no.such.host.invalid"


async def leave_before_the_name_is_found() -> list[dict[str, Any]]:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with Upstream(20.0) as upstream:
        asking = asyncio.create_task(upstream.page("GET", Address(UNKNOWN, 80), b"/", b"", limit=100))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        for _ in range(8):  # more than are searched for at once
            with pytest.raises(UpstreamBroken):
                await upstream.page("GET", Address(UNKNOWN, 80), b"/", b"", limit=100)
    gc.collect()
    return complaints


def test_a_name_that_is_not_found_after_its_caller_left_is_no_complaint() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(leave_before_the_name_is_found()) == []


async def find_another_way() -> bytes:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, family=socket.AF_INET)
    port = server.sockets[0].getsockname()[1]
    async with server, Upstream(20.0) as upstream:
        page = await upstream.page("GET", Address("localhost", port), b"/", b"", limit=100)
    return page.body


def test_of_several_addresses_of_a_name_one_that_listens_is_enough() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(find_another_way()) == b"ok"
