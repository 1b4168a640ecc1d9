"""Engines and a router to test with: real HTTP on loopback, faults at will, nothing slower than it must be."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy
from yarl import URL

from ems.http.address import Address
from ems.http.process import listen
from ems.http.server import Server
from ems.router.app import Router
from ems.router.config import RouterConfig
from ems.router.fleet import Instance, Role
from tests.router.soundness import unsound

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ANSWER = b'{"id":"cmpl-1", "object":"text_completion","choices":[{"index":0,"text":" caf\\u00e9"}],"usage":{}}'
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-7",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "10.0.0.1",
    "remote_port": 20001,
    "score": 0.1,
}


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return as soon as a condition holds; fail when it does not in time."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.002)


async def completion(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(body=ANSWER, content_type="application/json")


async def prefilled(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"id": "x", "choices": [{"text": "a"}], "kv_transfer_params": HANDOFF})


def status(code: int, body: bytes = b'{"error":{"message":"no","type":"X","param":null,"code":0}}') -> Handler:
    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(status=code, body=body, content_type="application/json", headers={"X-Engine": "e"})

    return answer


@dataclass(frozen=True)
class Seen:
    path: str
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


class FakeEngine:
    """An OpenAI-compatible server whose answers a test sets; remembers what it was asked."""

    def __init__(self, answer: Handler = completion, *, models: tuple[str, ...] = ("m",)) -> None:
        self.answer = answer
        self.models = models
        self.health = 200
        self.seen: list[Seen] = []
        self.probes = 0
        self.metrics: bytes | None = None
        """The page of metrics; without one the engine has no such page."""
        self.scrapes = 0
        self.arrived = asyncio.Event()
        self.abandoned = asyncio.Event()
        """Set when a client goes away before it had its answer."""
        self._runner: web.AppRunner | None = None
        self.address = Address("127.0.0.1", 1)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = Address("127.0.0.1", self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=self.health)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        return web.Response(status=404) if self.metrics is None else web.Response(body=self.metrics)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.raw_path, request.headers, b""))
        return web.json_response(
            {"object": "list", "data": [{"id": m, "object": "model", "root": str(self.address)} for m in self.models]}
        )

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.raw_path, request.headers, body))
        self.arrived.set()
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.abandoned.set()
            raise


class RawEngine:
    """A server that reads one request a connection and then does with the socket what a script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = 0
        self.address = Address("127.0.0.1", 1)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get /health"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                await writer.drain()
                return
            self.requests += 1
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def dead_address() -> Address:
    """Return an address on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", taken.getsockname()[1])


class Running:
    """A router that serves on loopback, and a client that knows its address."""

    def __init__(self, router: Router, address: Address, client: aiohttp.ClientSession, server: Server) -> None:
        self.router = router
        self.server = server
        self.address = address
        self.client = client

    def url(self, path: str) -> URL:
        return URL(f"http://{self.address}{path}", encoded=True)

    async def post(self, path: str = "/v1/completions", **arguments: Any) -> aiohttp.ClientResponse:
        """Post and read the whole answer; ``json`` or ``data`` and ``headers`` as in aiohttp."""
        if not arguments.keys() & {"json", "data"}:
            arguments["json"] = {"model": "m", "prompt": "hello"}
        async with asyncio.timeout(30):
            response = await self.client.post(self.url(path), **arguments)
            await response.read()
        return response

    async def get(self, path: str, **arguments: Any) -> aiohttp.ClientResponse:
        async with asyncio.timeout(30):
            response = await self.client.get(self.url(path), **arguments)
            await response.read()
        return response

    def instances(self) -> list[Instance]:
        return [instance for role in Role for instance in self.router.fleet.listed(role)]

    async def idle(self) -> None:
        """Wait until nothing runs; every load is zero then."""
        await until(lambda: not self.router.counters.running)

        assert unsound(self.router.fleet) == []
        assert all(not instance.load for instance in self.instances())


@asynccontextmanager
async def running(
    prefills: list[Address] | None = None, decodes: list[Address] | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """Run a router on a free port."""
    config = RouterConfig(
        prefills=tuple(prefills or ()), decodes=tuple(decodes or ()), **{"connect_timeout": 15.0, **settings}
    )
    async with Router(config) as router:
        server = Server(router, body_timeout=config.body_timeout)
        listener = listen("127.0.0.1", 0)
        await server.start(listener, router.tls)
        address = Address("127.0.0.1", listener.getsockname()[1])
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as client:
                here = Running(router, address, client, server)
                yield here
                await here.idle()
        finally:
            server.drain()
        await until(lambda: not server.connections)
