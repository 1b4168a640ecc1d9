"""The pages: is it well, what are its figures, and what an administrator may look at, as JSON.

``/health``, ``/livez``, ``/readyz`` and ``/version`` are for everybody, and so are the metrics of an open node, without
what namespaces are called; all else is for who knows the token, because anybody can connect.  A page under ``/admin``
answers what the verb of ``ems`` of that name says with ``-o json``.  ``/prefetch`` alone is told something.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ems.errors import PoolRefused
from ems.pool.administration.figures import By, grouped, judge
from ems.pool.http.metrics import PoolCollector
from ems.pool.http.prefetch import PrefetchPage
from ems.pool.protocol.acts import List, Show
from ems.version import __version__

if TYPE_CHECKING:
    from starlette.requests import Request

    from ems.pool.node.pool_node import Node

Page = Callable[["Request"], Response]
Endpoint = Callable[["Request"], Awaitable[Response]]

METRICS_SECONDS = 1.0
"""How old metrics may be that are shown again."""


class _Metrics:
    """The metrics, which are made once in :data:`METRICS_SECONDS` however often they are asked for.

    They are made in the node's loop, one after the other, and take the longer the more namespaces there are.
    """

    def __init__(self, host: Node, clock: Callable[[], float], *, names: bool) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(PoolCollector(host.figures, host.handler.measured, names=names))
        self._clock = clock
        self._made = b""
        self._made_at = -inf

    def __call__(self, _: Request) -> Response:
        now = self._clock()
        if not self._made_at <= now < self._made_at + METRICS_SECONDS:
            self._made, self._made_at = generate_latest(self._registry), now
        return Response(self._made, media_type=CONTENT_TYPE_LATEST)


def build_app(
    host: Node, *, private: bool = False, token: str = "", clock: Callable[[], float] = time.monotonic
) -> Starlette:
    """The application; names are shown to bearers of ``token`` only, and when ``private`` the metrics, too."""

    async def health(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        # A node is ready as soon as its socket listens, and this server starts after that.
        return Response("[+]socket ok\n[+]index ok\n", media_type="text/plain")

    async def version(_: Request) -> Response:
        return JSONResponse({"version": __version__})

    guarded: dict[str, Page] = {
        "/status": lambda _: JSONResponse(dict(host.figures())),
        "/metrics": _Metrics(host, clock, names=True),
        "/admin/list": lambda request: _list(host, request.query_params.get("by", "namespace")),
        "/admin/show": lambda request: _show(host, request.query_params.get("what", "")),
        "/admin/health": lambda _: _health(host),
    }
    for_others = {} if private else {"/metrics": _Metrics(host, clock, names=False)}
    for_all = {"/health": health, "/livez": health, "/readyz": ready, "/version": version}
    return Starlette(
        routes=[
            *(Route(path, page) for path, page in for_all.items()),
            *(Route(path, _for_bearers(page, token, for_others.get(path, _refuse))) for path, page in guarded.items()),
            Route("/prefetch", PrefetchPage(host, token).__call__, methods=["POST"]),
        ]
    )


def _for_bearers(page: Page, token: str, for_others: Page) -> Endpoint:
    """``page`` for those who know ``token``, of whom there are none without one."""

    async def answer(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        knows = bool(token) and hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
        return page(request) if knows else for_others(request)

    return answer


def _refuse(_: Request) -> Response:
    said = "this node shows what it holds to bearers of the token in its --http-token-file only\n"
    return Response(said, status_code=401, headers={"www-authenticate": "Bearer"}, media_type="text/plain")


def _list(host: Node, by: str) -> Response:
    for group in get_args(By):
        if by == group:
            return _json({"items": grouped(host.admin.look(List())["namespaces"], group)})
    return _mistake(f"by is {by[:80]!r}, expected one of {', '.join(get_args(By))}")


def _show(host: Node, what: str) -> Response:
    if not what:
        return _mistake("nothing is named, expected ?what= with a namespace, a key or a request")
    try:
        return _json(host.admin.look(Show(what)))
    except PoolRefused as error:
        return _mistake(str(error), status=404)


def _health(host: Node) -> Response:
    checks = judge(host.figures())
    well = all(check.well for check in checks)
    return _json({"well": well, "checks": checks}, status=200 if well else 503)


def _mistake(sentence: str, status: int = 400) -> Response:
    return _json({"error": sentence}, status)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
