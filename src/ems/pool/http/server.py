"""The HTTP server beside a node, in the node's own event loop, with connections and times of its own.

What always holds: whoever connects and says nothing, or half of something, or reads nothing, costs one of a few
connections for a few seconds; the descriptors that the clients of the pool need are not among these.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial

import structlog
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ems.pool.http.app import NodeReports, build_app
from ems.pool.http.budget import EXCHANGE_SECONDS, ConnectionBudget

LOOK_SECONDS = 1.0
"""How often it is looked who took too long."""
RETRY_SECONDS = 0.1
"""Pause after a connection could not be accepted."""

_log = structlog.get_logger("ems.node")


class Exchange(H11Protocol):
    """One connection, which tells the server's budget when it begins to be waited for."""

    def __init__(self, budget: ConnectionBudget[Exchange], config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._budget = budget

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._waits()

    def connection_lost(self, exc: Exception | None) -> None:
        self._budget.ended(self)
        super().connection_lost(exc)

    def _waits(self) -> None:
        for one in self._budget.waits(self, self.loop.time()):
            one.transport.abort()


class HttpServer:
    """Serves :func:`build_app`; ``token`` shows the pages that have names in them."""

    def __init__(self, host: NodeReports, *, private: bool = False, token: str = "") -> None:
        app = build_app(host, private=private, token=token)
        self._config = Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=int(EXCHANGE_SECONDS),
        )
        self._config.load()
        self._state = ServerState()
        self._budget: ConnectionBudget[Exchange] = ConnectionBudget()

    async def serve(self, listener: socket.socket) -> None:
        """Serve on ``listener`` until this is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        looking = asyncio.create_task(self._look())
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                    await loop.connect_accepted_socket(partial(Exchange, self._budget, self._config, self._state), sock)
                except OSError as error:
                    _log.warning("cannot accept an HTTP connection", reason=error.strerror)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            for one in list(self._state.connections):
                if one.transport is not None:
                    one.transport.abort()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for one in self._budget.overdue(asyncio.get_running_loop().time()):
                one.transport.abort()
