"""An OpenAI-compatible server in this process, for what `ems bench` must cope with."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Behaviour(msgspec.Struct):
    """What the server does otherwise than well."""

    models: tuple[str, ...] = ("tiny",)
    status: int = 200
    error_after: int | None = None
    """Chunks after which the stream carries an error."""
    cut_after: int | None = None
    """Chunks after which the connection breaks."""
    fail_prompts: frozenset[tuple[int, ...]] = frozenset()
    """Prompts that are refused."""


class OpenAIServer:
    """Answers each prompt with a text that depends on it alone, and counts what it sees."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.prompts: list[tuple[int, ...]] = []
        self.bodies: list[dict[str, object]] = []
        self.authorizations: Counter[str | None] = Counter()
        self.running = 0
        self.most_running = 0
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._completions)
        self._server = TestServer(application)
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        self.url = f"http://{self._server.host}:{self._server.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _models(self, request: web.Request) -> web.Response:
        self.authorizations[request.headers.get("Authorization")] += 1
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.behaviour.models]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = tuple(body["prompt"])
        self.prompts.append(prompt)
        self.bodies.append(body)
        if self.behaviour.status != 200 or prompt in self.behaviour.fail_prompts:
            status = 400 if self.behaviour.status == 200 else self.behaviour.status
            return web.json_response({"error": {"message": "not today"}}, status=status)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, prompt, body["max_tokens"])
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, prompt: tuple[int, ...], count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(count):
            if index == self.behaviour.error_after:
                await response.write(b'data: {"error": {"message": "engine is gone"}}\n\n')
                break
            if index == self.behaviour.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            chunk = {"choices": [{"index": 0, "text": f" {sum(prompt) + index}"}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response
