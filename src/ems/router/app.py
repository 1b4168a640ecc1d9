"""The router as a site: which page a request is for, and what happens when serving it goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from prometheus_client import generate_latest

from ems.files import WatchedFiles
from ems.http.client import Upstream
from ems.http.message import Refusal, Request
from ems.http.reply import Reply
from ems.kubernetes.folder import files_of
from ems.router.admission import tls
from ems.router.admission.service import Admission
from ems.router.choosing.chooser import Chooser
from ems.router.config import RouterConfig
from ems.router.errors import refuse
from ems.router.exchange import READS_ONLY, ClientLeft, Exchange, Parts
from ems.router.fleet import Fleet, Role
from ems.router.handoff import of_client
from ems.router.kthena.config_dump import PREFIX, config_dump
from ems.router.kthena.router_file import Schedulers
from ems.router.kthena.router_file import read as read_router_file
from ems.router.kthena.served import Served
from ems.router.kthena.sources import Cluster, Folder
from ems.router.metrics import CONTENT_TYPE, Counters, RouterCollector
from ems.router.observe.collector import RequestCollector
from ems.router.observe.observer import Observer
from ems.router.observe.record import Record
from ems.router.pages import Pages
from ems.router.prober import Prober
from ems.router.request import parse
from ems.router.scraper import Scraper
from ems.version import __version__

if TYPE_CHECKING:
    from ems.pool.http.prefetch_client import PrefetchClient
    from ems.router.workers.link import Link

CLIENT_LEFT = 499
"""The status under which a request is counted whose client left before it was answered."""

log = logging.getLogger("ems.router")


Serve = Callable[[Request, Reply], Awaitable[None] | None]

COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", *sorted(READS_ONLY))
"""Endpoints whose requests are given to engines, and counted, limited and logged."""

_KINDS = {
    **dict.fromkeys(("invalid_json", "invalid_body", "model_not_found"), "request_parsing"),
    **dict.fromkeys(("model_server_not_found", "no_decode_server", "no_prefill_server"), "pod_discovery"),
    **dict.fromkeys(("overloaded", "too_many_waiting"), "scheduling"),
    **dict.fromkeys(("decode_timeout", "request_timeout"), "proxy"),
}
"""What Kthena's metrics and access log call a refusal; the others keep their codes."""


class Page(NamedTuple):
    """What answers requests for one path with one method; an awaitable answer ends the request when it is done."""

    serve: Serve
    guard: Callable[[Request], Awaitable[None]] | None = None
    """Refuses requests of those whom the page is not for."""
    body_limit: int = 128 << 10
    """What workers tell each other of a page's body has room in a packet."""


class Router:
    """One router; an asynchronous context manager that owns its connections to instances and its prober."""

    def __init__(self, config: RouterConfig, upstream: Upstream | None = None, link: Link | None = None) -> None:
        self.config = config
        self.chooser = Chooser(session_lifetime=config.session_lifetime) if link is None else link.shares.chooser
        self.fleet = Fleet(self.chooser.forget) if link is None else link.shares.fleet
        self.counters = Counters()
        admission = config.admission if link is None else config.share(link.number)
        self._files = WatchedFiles()
        self.admission = Admission(admission, self._files, takes_limits=config.takes_limits)
        self.observer = Observer(config.observe, shared=link is not None)
        self.tls = tls.for_clients(config.tls)
        engines = tls.for_engines(config.tls)
        for path in config.tls.watched:
            self._files.watch(path, lambda: tls.reload(config.tls, self.tls, engines), loaded=True)
        self._upstream = upstream or Upstream(config.connect_timeout, engines)
        self._prober = Prober(self.fleet, self._upstream, config.probe_timeout)
        schedulers = Schedulers()
        if config.router_file is not None:
            place = config.router_file
            self._files.watch(place, lambda: schedulers.use(read_router_file(place)))
        self._prefetch: PrefetchClient | None = None
        if config.pool_nodes:
            from ems.pool.http.prefetch_client import PrefetchClient  # as for ZeroMQ below

            self._prefetch = PrefetchClient(config.pool_nodes)
            self.counters.hints = self._prefetch.counts
            if config.pool_key is not None:
                self._files.watch(config.pool_key, partial(self._prefetch.load_key, config.pool_key))
        self._parts = Parts(
            config,
            self.fleet,
            self.chooser,
            self.counters,
            self._upstream,
            self._prober,
            self.admission,
            self.observer,
            schedulers,
            prefetch=self._prefetch,
        )
        requests = RequestCollector(self.observer.series, self.observer.active)
        self._metrics = (RouterCollector(self.fleet, self.counters), requests)
        self.served: Served | None = None
        self._cluster: Cluster | None = None
        if config.manifests is not None or config.cluster is not None:
            self.served = Served(self._parts)
            if config.cluster is not None:
                self._cluster = Cluster(config.cluster, self.served)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._subscribed = contextlib.AsyncExitStack()
        pages = Pages(self._parts)
        self._pages = self._table(pages)
        if link is not None:
            from ems.router.workers.pages import SharedPages

            shared = SharedPages(link, pages, self.observer.decisions, self._metrics_page)
            for where, serve in shared.by_path.items():
                self._pages[where] = {method: page._replace(serve=serve) for method, page in self._pages[where].items()}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        for role, addresses in ((Role.PREFILL, self.config.prefills), (Role.DECODE, self.config.decodes)):
            for address in addresses:
                self.fleet.add(role, address, now, trusted=True)
        if self.served is not None and self.config.manifests is not None:
            place = self.config.manifests
            self._files.watch(place, Folder(place, self.served).load, files=partial(files_of, place))
        await self._upstream.__aenter__()
        works = [self._files.run(), self._prober.run(), Scraper(self._parts).run()]
        works += [one.run() for one in (self._cluster, self.admission.issuer) if one is not None]
        self._tasks = [asyncio.create_task(work) for work in works]
        if self._prefetch is not None:
            await self._subscribed.enter_async_context(self._prefetch)
        if self.config.kv_events:
            from ems.router.events.subscriber import Subscriber  # ZeroMQ is loaded by those who want it

            await self._subscribed.enter_async_context(Subscriber(self.config.kv_events, self.fleet, self.chooser))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscribed.aclose()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._upstream.__aexit__()
        await self.admission.close()
        self.observer.close()

    def reload(self) -> None:
        """Look now for what has changed in files or on an API server."""
        self._files.look(anyway=True)
        if self._cluster is not None:
            self._cluster.informer.wake()

    def admit(self, request: Request) -> int:
        page = self._find(request)
        if page.serve == self._complete:
            self.admission.gate.refuse_early(request.headers)
        return page.body_limit

    async def serve(self, request: Request, reply: Reply, refusal: Refusal | None) -> None:
        try:
            if refusal is None:
                page = self._find(request)
                if page.guard is not None:
                    await page.guard(request)
                answered = page.serve(request, reply)
                if answered is not None:
                    await answered
            else:
                if request.method == "POST" and request.path in COMPLETIONS:
                    self._turned_away(request, reply, refusal)
                refuse(reply, refusal)
        except Refusal as error:
            refuse(reply, error)
        except ClientLeft:
            pass  # the server closes what is left of the connection
        except Exception:  # the root of the request's task: a defect must not reach the client as a trace
            log.exception("Request %s failed by a defect of the router", reply.request_id.decode("latin-1"))
            if reply.status is None:
                refuse(reply, Refusal(500, "The router failed to serve the request", code="internal_error"))

    def _models(self, _: Request, reply: Reply) -> None:
        assert self.served is not None
        reply.json(200, {"object": "list", "data": self.served.models()})

    def _dump(self, request: Request, reply: Reply) -> None:
        path, now = request.path.removeprefix(PREFIX), asyncio.get_running_loop().time()
        found = None if self.served is None else config_dump(self.served.catalogue, self.fleet, path, now)
        if found is None:
            raise Refusal(404, f"There is no {request.path} here", code="not_found")
        reply.json(200, found)

    def _metrics_page(self) -> bytes:
        return b"".join(generate_latest(collector) for collector in self._metrics)

    def _find(self, request: Request) -> Page:
        methods = self._pages.get(request.path)
        if methods is None:
            below = (path for path in self._pages if path.endswith("/") and request.path.startswith(path))
            methods = self._pages.get(next(below, ""))
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

        async def known(request: Request) -> None:
            await self.admission.gate.identify(request.headers)

        async def administrators(request: Request) -> None:
            await self.admission.gate.administrator(request.headers, request.peer)

        async def operators(request: Request) -> None:
            """Administrators; everybody as long as there are no keys."""
            if self.config.admission.authenticates:
                await administrators(request)

        async def changing(request: Request) -> None:
            await operators(request)
            if self.served is not None:  # their next change would undo a removal, and no route names what is added
                raise Refusal(404, "Which servers there are is said by manifests here: change those", code="not_found")

        completions = Page(self._complete, body_limit=self.config.max_body_bytes)
        return {
            **{path: {"POST": completions} for path in COMPLETIONS},
            "/v1/models": {"GET": Page(pages.models if self.served is None else self._models, guard=known)},
            "/reset_prefix_cache": {"POST": Page(pages.reset_prefix_cache, guard=operators)},
            "/healthcheck": readable(pages.healthcheck),
            "/health": readable(pages.health),
            **dict.fromkeys(("/livez", "/healthz"), readable(pages.livez)),
            "/readyz": readable(pages.readyz),
            "/metrics": readable(lambda reply: reply.whole(200, self._metrics_page(), kind=CONTENT_TYPE)),
            "/version": readable(lambda reply: reply.json(200, {"version": __version__})),
            "/instances/add": {"POST": Page(pages.add, guard=changing)},
            "/instances/remove": {"POST": Page(pages.remove, guard=changing)},
            "/debug/requests": {"GET": Page(pages.decisions, guard=administrators)},
            "/debug/requests/": {"GET": Page(pages.decision, guard=administrators)},
            PREFIX: {"GET": Page(self._dump, guard=administrators)},
        }

    async def _complete(self, request: Request, reply: Reply) -> None:
        counters = self.counters
        counters.running += 1
        status: int | None = None
        record = self._record(request, reply)
        try:
            record.principal = await self.admission.gate.identify(request.headers)
            record.user = record.principal.user
            completion = of_client(parse(request.body))
            record.model = completion.model
            record.input_tokens = completion.prompt_tokens
            parts = self._parts
            if self.served is not None:
                parts, completion = self.served.route(completion, request)
            await Exchange(parts, request, completion, reply, record).run()
        except Refusal as refusal:
            status = refusal.status
            record.fails(refusal.kind or _KINDS.get(refusal.code, refusal.code), refusal.message)
            raise
        except ClientLeft:
            counters.disconnects += 1
            record.broken = True
            record.fails("client_left", "The client left before its answer was complete")
            raise
        finally:
            counters.running -= 1
            record.status = reply.status or status or CLIENT_LEFT
            counters.answered[request.path, record.status] += 1
            self.observer.finished(record, self._loop.time())

    def _record(self, request: Request, reply: Reply) -> Record:
        record = Record(reply.request_id.decode("latin-1"), request.method, request.path, self._loop.time())
        self.observer.started(record)
        return record

    def _turned_away(self, request: Request, reply: Reply, refusal: Refusal) -> None:
        """Note a request whose body nobody looked at."""
        record = self._record(request, reply)
        record.fails(refusal.kind or _KINDS.get(refusal.code, refusal.code), refusal.message)
        record.status = refusal.status
        self.observer.finished(record, record.arrived)
