"""The HTTP server beside a node, in the node's own event loop, with connections and times of its own.

What always holds: whoever connects and says nothing, or half of something, or reads nothing, costs one of a few
connections for a few seconds; the descriptors that the clients of the pool need are not among these; whoever asks all
the time costs a small share of the loop's.
"""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

import h11
import structlog
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ems.pool.http.app import build_app
from ems.pool.node.client_limits import MAX_HTTP

EXCHANGE_SECONDS = 10.0
"""How long a request and its answer may take, and how long a connection may be idle."""
RETRY_SECONDS = 0.1
"""Pause after a connection could not be accepted."""
ACCEPT_SECONDS = 0.001
"""From one connection to the next: one that is refused at once costs the loop a fifth of that."""
HEAD_BYTES: Final = 8 << 10
"""Of a request's head; thousands of short fields would cost the loop more than all that is done about them."""

if TYPE_CHECKING:
    from ems.pool.node.pool_node import Node

PAUSE_SECONDS = 0.005
"""From one answer to the next: the node's own clients are served in between, however much is asked for here."""

_HEAD_ENDS: Final = re.compile(rb"\n\r?\n")

_log = structlog.get_logger("ems.node")


class _Requests(h11.Connection):
    """Reads requests with small heads and without chunks: one that comes as many small parts would stall the loop."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        if self.their_state is h11.IDLE:
            unread, _ = self.trailing_data
            if len(unread) > HEAD_BYTES and _HEAD_ENDS.search(unread, 0, HEAD_BYTES) is None:
                raise h11.RemoteProtocolError("its head is too large")
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("its length is not said")
        return event


class Exchange(H11Protocol):
    """One connection, which ends when it keeps the server waiting for :data:`EXCHANGE_SECONDS`.

    There are never more than :data:`MAX_HTTP`, which are in ``waiting``: when one more comes, the one ends that has
    been waited for longest, so that nobody is kept out by who says nothing.
    """

    def __init__(self, waiting: dict[Exchange, None], config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.conn = _Requests()
        self._waiting = waiting
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._waits()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _waits(self) -> None:
        """From now on the next request of this connection, and its answer, are waited for."""
        self._forget()
        self._deadline = self.loop.call_later(EXCHANGE_SECONDS, self.end)
        self._waiting[self] = None
        if len(self._waiting) > MAX_HTTP:
            next(iter(self._waiting)).end()

    def end(self) -> None:
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()


class Paced:
    """``app``, which gets one request at a time, and the next one after a pause."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._next_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        begins_at = max(self._next_at, loop.time())
        if begins_at - loop.time() > MAX_HTTP * PAUSE_SECONDS:  # most of them are gone by now
            await PlainTextResponse("too many requests wait, ask again\n", 503)(scope, receive, send)
            return
        self._next_at = begins_at + PAUSE_SECONDS
        await asyncio.sleep(begins_at - loop.time())
        await self._app(scope, receive, send)


class HttpServer:
    """Serves :func:`build_app`; ``token`` shows the pages that have names in them."""

    def __init__(self, host: Node, *, private: bool = False, token: str = "") -> None:
        self._config = Config(
            Paced(build_app(host, private=private, token=token)),
            interface="asgi3",
            http="h11",
            ws="none",
            log_config=None,
            log_level="error",  # it warns of what anybody sends
            access_log=False,
            lifespan="off",
            timeout_keep_alive=int(EXCHANGE_SECONDS),
        )
        self._config.load()
        self._state = ServerState()
        self._waiting: dict[Exchange, None] = {}

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        exchange = partial(Exchange, self._waiting, self._config, self._state)
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                    await loop.connect_accepted_socket(exchange, sock)
                    await asyncio.sleep(ACCEPT_SECONDS)
                except OSError as error:
                    _log.warning("cannot accept an HTTP connection", reason=error.strerror)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            for one in list(self._state.connections):
                if one.transport is not None:
                    one.transport.abort()
