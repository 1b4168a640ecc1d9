"""Connections of clients: each reads one request after the other and has it served by a task of its own.

What always holds: answers go out in the order of their requests, one each; a client that closes its connection ends the
task that serves it; a head, a body, the next request and the reading of an answer have a bounded time; what arrives
while a request is served is bounded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import deque
from email.utils import formatdate
from typing import Any, Final, Protocol, cast

import httptools

from ems.http.message import Headers, Refusal, Request, check, too_large
from ems.http.reply import Reply

HEAD_LIMIT: Final = 64 << 10
"""Largest head of a request in bytes, and largest trailer."""
_AHEAD_LIMIT = 256 << 10  # read of a client's next requests while one is served; more would hide that it left
_HEAD_SECONDS = 30.0
_LINGER_SECONDS = 2.0  # how long the rest of a refused body is read, so that the client gets to see the answer
_KEEP_ALIVE_SECONDS = 65.0  # above the usual 60 of proxies and clients, so that they close first
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("ems.http")


class Site(Protocol):
    """What is served."""

    def admit(self, request: Request) -> int:
        """Look at a request's head; return how large its body may be.

        :raises Refusal: the body need not be sent.
        """

    async def serve(self, request: Request, reply: Reply, refusal: Refusal | None) -> None:
        """Answer a complete request, or one that was refused before; raises nothing but cancellation."""


class Server:
    """Accepts connections and knows those that are open."""

    def __init__(self, site: Site, *, body_timeout: float) -> None:
        self.site = site
        self.body_timeout = body_timeout
        self.draining = False
        self.connections: set[Connection] = set()
        self.loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._emptied = asyncio.Event()
        self._date = b""
        self._date_until = 0.0

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._listener = await self.loop.create_server(lambda: Connection(self), sock=listener, ssl=tls, backlog=2048)

    def date(self) -> bytes:
        now = self.loop.time()
        if now >= self._date_until:
            self._date = formatdate(time.time(), usegmt=True).encode()
            self._date_until = now + 1.0
        return self._date

    def drain(self) -> None:
        """Accept nothing more; connections close when what they serve has ended."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.drain()
        self._emptied.set()

    async def drained(self, timeout: float) -> None:
        """Wait until all connections have ended; after ``timeout`` seconds, end what is still served."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._empty()
        for connection in list(self.connections):
            connection.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._empty()
        for connection in list(self.connections):
            connection.abort()

    async def _empty(self) -> None:
        while self.connections:
            self._emptied.clear()
            await self._emptied.wait()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()


class Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = server.loop
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._peer = ""
        # The request that arrives.
        self._url = b""
        self._headers: Headers = []
        self._request: Request | None = None
        """Has its head, and not yet its body."""
        self._refusal: Refusal | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._body_limit = 0
        self._head_size = 0
        self._begun = False
        self._offered = False
        """Whether its head offers another protocol."""
        # The requests that have arrived, and the one that is served.
        self._waiting: deque[tuple[Request, Refusal | None]] = deque()
        self._ahead = 0
        self._task: asyncio.Task[None] | None = None
        self._reply: Reply | None = None
        self._keeps_alive = True
        self._lingering = False
        # Deadlines: one timer, set anew only when it rings or is too late.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._blocked = False
        """Whether the client does not take what is sent: nothing more is served until it does."""

    # ------------------------------------------------------------------------------------------- the event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        name = transport.get_extra_info("peername")
        self._peer = str(name[0]) if isinstance(name, tuple) else ""
        self._server.connections.add(self)
        self._expect_by(self._loop.time() + _KEEP_ALIVE_SECONDS)
        if self._server.draining:
            transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._keeps_alive = False
        if self._task is not None and self._reply is not None and not self._reply.ended:
            self._reply.client_left = True
            self._task.cancel()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._blocked = True
        if self._reply is not None:
            self._reply.block()

    def resume_writing(self) -> None:
        self._blocked = False
        if self._reply is not None:
            self._reply.unblock()
        if self._waiting:
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        self._head_size += len(data)
        if self._task is not None or self._waiting:
            self._ahead += len(data)
            if self._ahead > _AHEAD_LIMIT and not self._transport.is_closing():
                self._transport.pause_reading()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._malformed(error)
            return
        if self._begun and self._head_size > HEAD_LIMIT:
            message = f"The request's head, or its trailer, has more than {HEAD_LIMIT} bytes"
            self._refuse_head(Refusal(431, message, code="head_too_large"))
        elif self._request is not None:
            self._await_body(self._request)
        elif self._begun and self._task is None:
            self._expect_by(self._loop.time() + _HEAD_SECONDS)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offered:  # CONNECT, which is refused
                    return
                self._offered = False
                parser, self._parser = self._parser, httptools.HttpRequestParser(self)
                data = self._without_offer(parser) + data[upgrade.args[0] :]
            else:
                return

    def _without_offer(self, parser: Any) -> bytes:
        """Return the head of a request that offers another protocol as it would be if it did not.

        The server need not accept; but the parser takes what follows for the other protocol, where it may be a body.
        """
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines.extend(b"%b: %b" % pair for pair in self._headers if pair[0] not in (b"connection", b"upgrade"))
        if not parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join((*lines, b"", b""))

    # ----------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._begun = True
        self._deadline = None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is None:  # else it is a trailer, which means nothing here
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method().decode("latin-1")
        if parser.should_upgrade() and method != "CONNECT":
            self._offered = True
            return
        keeps_alive = parser.should_keep_alive() and method != "CONNECT"
        request = Request(method, self._url, self._headers, parser.get_http_version(), keeps_alive=keeps_alive)
        request.peer = self._peer
        self._request = request
        self._deadline = None
        self._refusal = None
        self._body = []
        self._body_size = 0
        try:
            check(request)
        except Refusal as refusal:  # who knows where it ends
            self._refusal = refusal
            request.keeps_alive = False
            return
        try:
            self._body_limit = self._server.site.admit(request)
            for name, value in self._headers:
                if name == b"content-length" and int(value) > self._body_limit:
                    raise too_large(self._body_limit)
        except Refusal as refusal:
            self._refusal = refusal

    def on_body(self, piece: bytes) -> None:
        self._head_size = 0
        if self._refusal is not None:
            return
        self._body_size += len(piece)
        if self._body_size > self._body_limit:
            self._refusal = too_large(self._body_limit)
            self._body = []
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        request, refusal = self._request, self._refusal
        assert request is not None
        self._request = self._refusal = None
        self._begun = False
        self._head_size = 0
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._waiting.append((request, refusal))
        if self._task is None:
            self._next()

    # ---------------------------------------------------------------------------------------------------------- serving

    def _await_body(self, request: Request) -> None:
        if self._task is not None or self._waiting:
            return  # its turn has not come
        if self._refusal is not None:
            self._refuse_body(request, self._refusal)
            return
        if self._deadline is None and not self._body_size and request.awaits_continue:
            self._transport.write(_CONTINUE)
        self._expect_by(self._loop.time() + self._server.body_timeout)

    def _serve(self, request: Request, refusal: Refusal | None) -> None:
        self._deadline = None
        last = self._server.draining or (self._lingering and not self._waiting)
        self._keeps_alive = request.keeps_alive and not last
        reply = self._reply = Reply(self, request, self._server.date(), keeps_alive=self._keeps_alive)
        task = self._task = self._loop.create_task(self._server.site.serve(request, reply, refusal))
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        reply, self._task = self._reply, None
        assert reply is not None
        if not task.cancelled() and task.exception() is not None:
            log.error("A request's task failed by a defect", exc_info=task.exception())
        if not reply.ended:  # it cannot be completed, which the client must see
            self._transport.abort() if reply.unframed else self._close()
        elif self._waiting and self._keeps_alive and not self._server.draining:
            self._next()
        elif self._lingering:
            self._linger()
        elif not self._keeps_alive or self._server.draining:
            self._close()
        elif not self._transport.is_closing():
            self._ahead = 0
            self._transport.resume_reading()
            if self._request is not None:
                self._await_body(self._request)
            else:
                self._expect_by(self._loop.time() + _KEEP_ALIVE_SECONDS)

    def _next(self) -> None:
        """Serve the request that has waited longest, once the client has taken the answers before."""
        if self._blocked:
            self._expect_by(self._loop.time() + _KEEP_ALIVE_SECONDS)
        elif self._task is None:
            self._serve(*self._waiting.popleft())

    def _refuse_body(self, request: Request, refusal: Refusal) -> None:
        """Answer before the body is there; the connection is of no more use then."""
        self._lingering = True
        request.keeps_alive = False
        self._serve(request, refusal)

    def _refuse_head(self, refusal: Refusal) -> None:
        if self._task is not None or self._waiting:  # they are answered first; this one sees its connection close
            self._lingering = True
            return
        self._refuse_body(Request("", b"/", [], "1.1", keeps_alive=False), refusal)

    def _malformed(self, error: httptools.HttpParserError) -> None:
        if isinstance(error, httptools.HttpParserCallbackError):
            log.error("A request's head failed by a defect", exc_info=error)
        self._refuse_head(Refusal(400, f"This is not HTTP/1.1 as it should be: {error}", code="invalid_http"))

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # else the loop is about to say that the connection is lost
            self._transport.write(data)

    def _close(self) -> None:
        """Close when all is sent, and do not wait for ever for that."""
        self._transport.close()
        self._deadline = None
        self._expect_by(self._loop.time() + _KEEP_ALIVE_SECONDS)

    def _linger(self) -> None:
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._deadline = None
        self._expect_by(self._loop.time() + _LINGER_SECONDS)

    def drain(self) -> None:
        if self._task is None and not self._begun:
            self._close()

    def end(self) -> None:
        """End what is served; the client is told."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # -------------------------------------------------------------------------------------------------------- deadlines

    def _expect_by(self, deadline: float) -> None:
        """Give the client until ``deadline`` for what is awaited now, unless it has a deadline for that already."""
        if self._deadline is not None:
            return
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        now = self._loop.time()
        deadline, self._deadline = self._deadline, None
        if deadline > now:
            self._expect_by(deadline)
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:  # an answer that is still read
            self._unsent = unsent
            self._expect_by(now + _KEEP_ALIVE_SECONDS)
        elif self._request is not None and not self._lingering and not self._waiting:
            refusal = Refusal(408, "The request body did not arrive in time", code="body_timeout")
            self._refuse_body(self._request, refusal)
        elif self._begun and not self._lingering and not self._waiting:
            self._refuse_head(Refusal(408, "The request's head did not arrive in time", code="head_timeout"))
        else:
            self._transport.abort() if unsent else self._transport.close()
