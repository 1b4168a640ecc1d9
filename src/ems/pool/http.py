"""What a node shows over HTTP: ``/health``, ``/livez``, ``/readyz``, ``/version``, ``/metrics``, ``/status``.

Read only: everything that changes the pool goes over its private socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

Figures = Callable[[], Mapping[str, Any]]

_GAUGES = {
    "bytes_total": "Bytes of shared memory of the pool",
    "bytes_touched": "Bytes of it that were touched and can be handed out",
    "bytes_used": "Bytes of it that hold pages",
    "clients": "Connected clients",
    "leases": "Leases held by readers",
    "reservations": "Reservations held by writers",
    "slots_resting": "Slots that wait for a cut-off writer to end",
    "segments": "Segments of the pool",
    "segments_assigned": "Segments carved for a namespace",
    "uptime_seconds": "Seconds since the node started",
}
_COUNTERS = {
    "lookups": "Lookups answered",
    "keys_looked_up": "Keys asked for",
    "keys_hit": "Keys found present in a leading run",
    "tails_hit": "Blocks that are not full, found by their tokens",
    "pages_committed": "Pages stored",
    "pages_evicted": "Pages evicted",
    "pages_aborted": "Pages reserved and never committed",
    "refused_no_space": "Pages refused because all was leased or being written",
    "refused_not_touched": "Pages refused because their memory was not touched yet",
    "already_present": "Pages offered that were present already",
    "already_writing": "Pages offered that another writer was writing",
    "leases_lost": "Leases ended by their holder's disappearance",
    "reservations_lost": "Reservations ended by their holder's disappearance",
}
_NAMESPACE_GAUGES = {
    "pages": "Pages present",
    "writing": "Pages being written",
    "capacity": "Slots of the namespace",
    "page_size": "Bytes of one page",
}


class PoolCollector(Collector):
    """Turns the node's figures into metrics at the moment of a scrape."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ems_pool_{name}", text, value=figures[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ems_pool_{name}", text, value=figures["counters"][name])
        for name, text in _NAMESPACE_GAUGES.items():
            family = GaugeMetricFamily(f"ems_pool_namespace_{name}", text, labels=["namespace"])
            for namespace in figures["namespaces"]:
                family.add_metric([namespace["name"]], namespace[name])
            yield family


def build_app(figures: Figures) -> Starlette:
    """The application; ``figures`` answers the node's figures."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(figures))

    async def health(_: Request) -> Response:
        return Response()

    async def ready(_: Request) -> Response:
        # A node is ready as soon as its socket listens, and this server starts after that.
        return Response("[+]socket ok\n[+]index ok\n", media_type="text/plain")

    async def version(_: Request) -> Response:
        return JSONResponse({"version": figures()["release"]})

    async def status(_: Request) -> Response:
        return JSONResponse(dict(figures()))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/livez", health),
            Route("/readyz", ready),
            Route("/version", version),
            Route("/status", status),
            Route("/metrics", metrics),
        ]
    )


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the node that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the node's."""
        yield


def build_server(figures: Figures) -> QuietServer:
    """A server for :func:`build_app`, to be served on a socket that is bound already."""
    config = uvicorn.Config(
        build_app(figures), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    return QuietServer(config)
