"""A small API server: lists, watches, resource versions, bookmarks, expiry, tokens, as Kubernetes has them.

No control plane can be installed where these tests run, so this stands for one: real HTTP, objects as JSON.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, Self

from aiohttp import web


class FakeApiServer:
    """Keeps objects of any resource; every change is a new version that watches are told of."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.token = "token-1"
        self.objects: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
        self.version = 100
        self.changes: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 0
        """Watches from a version below this one are told 410."""
        self.broken = 0
        """How many requests are answered 500 before it works again."""
        self.nonsense = 0
        """How many requests are answered with what is no JSON."""
        self.calls: list[str] = []
        self.page = 500
        self.url = ""
        self._watches: dict[asyncio.Queue[dict[str, Any] | None], str] = {}

    def put(self, resource: str, one: dict[str, Any]) -> None:
        key = (one["metadata"].get("namespace", "default"), one["metadata"]["name"])
        known = self.objects.setdefault(resource, {})
        self._changed("MODIFIED" if key in known else "ADDED", resource, one)
        known[key] = one

    def delete(self, resource: str, namespace: str, name: str) -> None:
        self._changed("DELETED", resource, self.objects[resource].pop((namespace, name)))

    def _changed(self, kind: str, resource: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        event = {"type": kind, "object": json.loads(json.dumps(one))}
        self.changes.append((self.version, resource, event))
        for queue, what in self._watches.items():
            if what == resource:
                queue.put_nowait(event)

    @property
    def watching(self) -> set[str]:
        return set(self._watches.values())

    def forget(self) -> None:
        """End all watches, and know nothing of what was before."""
        self.oldest = self.version + 1
        self.version += 1
        self.cut()

    def cut(self) -> None:
        for queue in self._watches:
            queue.put_nowait(None)

    def bookmark(self, resource: str) -> None:
        for queue, what in self._watches.items():
            if what == resource:
                queue.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(f"{request.path}{'?watch' if 'watch' in request.query else ''}")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if self.broken:
            self.broken -= 1
            return web.json_response({"kind": "Status", "code": 500}, status=500)
        if self.nonsense:
            self.nonsense -= 1
            return web.Response(body=b"<html>")
        resource = request.path.rpartition("/")[2]
        if "watch" in request.query:
            return await self._watch(request, resource)
        names = sorted(self.objects.get(resource, {}))
        begin = int(request.query.get("continue", "0"))
        items = [self.objects[resource][name] for name in names[begin : begin + self.page]]
        # As the real one: items of a list say neither kind nor version.
        items = [{key: value for key, value in one.items() if key not in ("kind", "apiVersion")} for one in items]
        metadata = {"resourceVersion": str(self.version)}
        if begin + self.page < len(names):
            metadata["continue"] = str(begin + self.page)
        return web.json_response({"kind": "AnyList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for version, what, event in self.changes:
            if version > since and what == resource:
                queue.put_nowait(event)
        self._watches[queue] = resource
        try:
            while (next_event := await queue.get()) is not None:
                await response.write(json.dumps(next_event).encode() + b"\n")
        finally:
            del self._watches[queue]
        return response
