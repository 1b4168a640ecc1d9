"""The HTTP server beside a node, in the node's own event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from ems.pool.http.app import Host, build_app


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the node that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the node's."""
        yield


def build_server(host: Host, *, private: bool = False, token: str = "") -> QuietServer:
    """A server for :func:`build_app`, to be served on a socket that is bound already."""
    config = uvicorn.Config(
        build_app(host, private=private, token=token),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    return QuietServer(config)
