"""The router as a site: which page a request is for, and what happens when serving it goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, Self

from prometheus_client import generate_latest

from ems.router.choosing.chooser import Chooser
from ems.router.config import RouterConfig
from ems.router.exchange import ClientLeft, Exchange, Parts
from ems.router.fleet import Fleet, Role
from ems.router.http.client import Upstream
from ems.router.http.message import Request
from ems.router.manifest_watch import ManifestWatch
from ems.router.metrics import CONTENT_TYPE, Counters, RouterCollector
from ems.router.pages import Pages
from ems.router.prober import Prober
from ems.router.reply import Refusal, Reply
from ems.router.request import CompletionRequest, parse

CLIENT_LEFT = 499
"""The status under which a request is counted whose client left before it was answered."""

log = logging.getLogger("ems.router")


class Page(NamedTuple):
    """What answers requests for one path with one method; an awaitable answer ends the request when it is done."""

    serve: Callable[[Request, Reply], Awaitable[None] | None]
    body_limit: int = 1 << 20


class Router:
    """One router; an asynchronous context manager that owns its connections to instances and its prober."""

    def __init__(self, config: RouterConfig, upstream: Upstream | None = None) -> None:
        self.config = config
        self.chooser = Chooser(session_lifetime=config.session_lifetime)
        self.fleet = Fleet(self.chooser.forget)
        self.counters = Counters()
        self._upstream = upstream or Upstream(config.connect_timeout)
        self._prober = Prober(self.fleet, self._upstream, config.probe_timeout)
        self._parts = Parts(config, self.fleet, self.chooser, self.counters, self._upstream, self._prober)
        self._metrics = RouterCollector(self.fleet, self.counters)
        self.manifests = (
            None if config.manifests is None else ManifestWatch(config.manifests, config, self.fleet, random.Random())
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._pages = self._table(Pages(self._parts))

    async def __aenter__(self) -> Self:
        now = asyncio.get_running_loop().time()
        for role, addresses in ((Role.PREFILL, self.config.prefills), (Role.DECODE, self.config.decodes)):
            for address in addresses:
                self.fleet.add(role, address, now, trusted=True)
        if self.manifests is not None:
            self.manifests.start(now)
            self._tasks.append(asyncio.create_task(self.manifests.run()))
        await self._upstream.__aenter__()
        self._tasks.append(asyncio.create_task(self._prober.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._upstream.__aexit__()

    def reload(self) -> None:
        """Read the manifests again, changed or not."""
        if self.manifests is not None:
            self.manifests.reload()

    def admit(self, request: Request) -> int:
        return self._find(request).body_limit

    async def serve(self, request: Request, reply: Reply, refusal: Refusal | None) -> None:
        try:
            if refusal is None:
                answered = self._find(request).serve(request, reply)
                if answered is not None:
                    await answered
            else:
                reply.refuse(refusal)
        except Refusal as error:
            reply.refuse(error)
        except ClientLeft:
            pass  # the server closes what is left of the connection
        except Exception:  # the root of the request's task: a defect must not reach the client as a trace
            log.exception("Request %s failed by a defect of the router", reply.request_id.decode("latin-1"))
            if reply.status is None:
                reply.refuse(Refusal(500, "The router failed to serve the request", code="internal_error"))

    def _models(self, reply: Reply) -> None:
        assert self.manifests is not None
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "ems"} for name in self.manifests.routes.models
        ]
        reply.json(200, {"object": "list", "data": models})

    def _find(self, request: Request) -> Page:
        methods = self._pages.get(request.path)
        if methods is None:
            raise Refusal(404, f"There is no {request.path} here", code="not_found")
        page = methods.get(request.method)
        if page is None:
            message = f"{request.method} is not allowed here: expected {' or '.join(methods)}"
            raise Refusal(405, message, code="method_not_allowed", headers={"allow": ", ".join(methods)})
        return page

    def _table(self, pages: Pages) -> dict[str, dict[str, Page]]:
        def readable(answer: Callable[[Reply], None]) -> dict[str, Page]:
            return dict.fromkeys(("GET", "HEAD"), Page(lambda _, reply: answer(reply)))

        def metrics(reply: Reply) -> None:
            reply.whole(200, generate_latest(self._metrics), kind=CONTENT_TYPE)

        completions = Page(self._complete, self.config.max_body_bytes)
        return {
            "/v1/completions": {"POST": completions},
            "/v1/chat/completions": {"POST": completions},
            "/v1/models": {"GET": Page(pages.models)} if self.manifests is None else readable(self._models),
            "/reset_prefix_cache": {"POST": Page(pages.reset_prefix_cache)},
            "/healthcheck": readable(pages.healthcheck),
            "/health": readable(pages.health),
            "/livez": readable(pages.livez),
            "/readyz": readable(pages.readyz),
            "/metrics": readable(metrics),
            "/instances/add": {"POST": Page(pages.add)},
            "/instances/remove": {"POST": Page(pages.remove)},
        }

    def _routed(self, request: Request, completion: CompletionRequest) -> tuple[Parts, CompletionRequest]:
        """Return which instances serve a request, by which settings, and the request as they get it.

        :raises Refusal: with status 404, no route is for it.
        """
        if self.manifests is None:
            return self._parts, completion
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        target = self.manifests.routes.match(completion.model, request.path, fields)
        if target is None:
            raise Refusal(404, f"There is no route for the model {completion.model!r}", code="model_not_found")
        config = self.manifests.configs[target.server]
        return replace(self._parts, config=config, server=target.server), completion.renamed(target.model)

    async def _complete(self, request: Request, reply: Reply) -> None:
        counters = self.counters
        counters.running += 1
        status: int | None = None
        try:
            parts, completion = self._routed(request, parse(request.body))
            await Exchange(parts, request, completion, reply).run()
        except Refusal as refusal:
            status = refusal.status
            raise
        except ClientLeft:
            counters.disconnects += 1
            raise
        finally:
            counters.running -= 1
            counters.answered[request.path, reply.status or status or CLIENT_LEFT] += 1
