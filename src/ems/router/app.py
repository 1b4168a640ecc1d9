"""The router as an ASGI application: which page a request is for, and what happens when serving it goes wrong.

A plain ASGI callable: a framework's routing and response classes would cost more than all the rest of the hot path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Self

from prometheus_client import generate_latest

from ems.errors import ProtocolError
from ems.router import headers
from ems.router.config import RouterConfig
from ems.router.exchange import ClientLeft, Exchange, Parts, receive_body
from ems.router.fleet import Fleet, Role
from ems.router.metrics import CONTENT_TYPE, Counters, RouterCollector
from ems.router.pages import Pages
from ems.router.prober import Prober
from ems.router.reply import Receive, Refusal, Reply, Scope, Send
from ems.router.upstream import Upstream

Page = Callable[[Scope, Receive, Reply], Awaitable[None]]

CLIENT_LEFT = 499
"""The status under which a request is counted whose client left before it was answered."""

_ADMIN_BODY_LIMIT = 1 << 20

log = logging.getLogger("ems.router")


class Router:
    """One router; an asynchronous context manager that owns its connections and its prober, and an ASGI callable."""

    def __init__(self, config: RouterConfig, upstream: Upstream | None = None) -> None:
        self.config = config
        self.fleet = Fleet()
        self.counters = Counters()
        self._upstream = upstream or Upstream(config.connect_timeout)
        self._prober = Prober(self.fleet, self._upstream, config.probe_timeout)
        self._parts = Parts(config, self.fleet, self.counters, self._upstream, self._prober)
        self._metrics = RouterCollector(self.fleet, self.counters)
        self._probing: asyncio.Task[None] | None = None
        self._pages = self._table(Pages(self._parts))

    async def __aenter__(self) -> Self:
        now = asyncio.get_running_loop().time()
        for role, addresses in ((Role.PREFILL, self.config.prefills), (Role.DECODE, self.config.decodes)):
            for address in addresses:
                self.fleet.add(role, address, now, trusted=True)
        await self._upstream.__aenter__()
        self._probing = asyncio.create_task(self._prober.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
        await self._upstream.__aexit__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ProtocolError(f"The router speaks HTTP only, not {scope['type']!r}")
        reply = Reply(send, headers.find(scope["headers"], b"x-request-id") or secrets.token_hex(16).encode())
        try:
            page = self._find(scope)
            await page(scope, receive, reply)
        except Refusal as refusal:
            await reply.refuse(refusal)
        except ClientLeft:
            pass  # the server closes what is left of the connection
        except Exception:  # the root of the request's task: a defect must not reach the client as a trace
            log.exception("Request %s failed by a defect of the router", reply.request_id.decode("latin-1"))
            if reply.status is None:
                await reply.refuse(Refusal(500, "The router failed to serve the request", code="internal_error"))

    def _find(self, scope: Scope) -> Page:
        methods = self._pages.get(scope["path"])
        if methods is None:
            raise Refusal(404, f"There is no {scope['path']} here", code="not_found")
        page = methods.get(scope["method"])
        if page is None:
            message = f"{scope['method']} is not allowed here: expected {' or '.join(methods)}"
            raise Refusal(405, message, code="method_not_allowed", headers={"allow": ", ".join(methods)})
        return page

    def _table(self, pages: Pages) -> dict[str, dict[str, Page]]:
        def readable(answer: Callable[[Reply], Awaitable[None]]) -> dict[str, Page]:
            return dict.fromkeys(("GET", "HEAD"), lambda _scope, _receive, reply: answer(reply))

        return {
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._complete},
            "/v1/models": {"GET": lambda scope, _, reply: pages.models(scope, reply)},
            "/reset_prefix_cache": {"POST": lambda scope, _, reply: pages.reset_prefix_cache(scope, reply)},
            "/healthcheck": readable(pages.healthcheck),
            "/health": readable(pages.health),
            "/livez": readable(pages.livez),
            "/readyz": readable(pages.readyz),
            "/metrics": readable(lambda reply: reply.whole(200, generate_latest(self._metrics), kind=CONTENT_TYPE)),
            "/instances/add": {"POST": self._changing(pages.add)},
            "/instances/remove": {"POST": self._changing(pages.remove)},
        }

    def _changing(self, change: Callable[[bytes, Reply], Awaitable[None]]) -> Page:
        async def page(scope: Scope, receive: Receive, reply: Reply) -> None:
            body = await receive_body(scope, receive, limit=_ADMIN_BODY_LIMIT, timeout=self.config.body_timeout)
            await change(body, reply)

        return page

    async def _complete(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        counters = self.counters
        counters.running += 1
        status: int | None = None
        try:
            await Exchange(self._parts, scope, receive, reply).run()
        except Refusal as refusal:
            status = refusal.status
            raise
        except ClientLeft:
            counters.disconnects += 1
            raise
        finally:
            counters.running -= 1
            counters.answered[scope["path"], reply.status or status or CLIENT_LEFT] += 1
