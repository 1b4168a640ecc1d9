"""Connections to servers, kept for the next request where the server allows it.

A kept connection may have been closed by the server at the very moment at which it is used again.  When it ends without
a byte of an answer, and only then, the request is sent once more, on a new connection.

What always holds: a failure of the other side is an :class:`UpstreamBroken`; a call that is cancelled, or told to fail,
before the answer's end closes its connection, which is how a server learns that nobody waits any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from socket import SOCK_STREAM
from typing import Any, Final, NamedTuple, Protocol, Self, cast

import httptools

from ems.errors import EmsError
from ems.http.address import Address
from ems.http.message import Headers

HEAD_LIMIT: Final = 64 << 10
"""Largest head of an answer in bytes, and largest trailer."""
# Servers behind uvicorn close idle connections after 5 s; ours must not be in use by then.
_KEEP_ALIVE_SECONDS = 4.0

log = logging.getLogger("ems.http")


class UpstreamBroken(EmsError, ConnectionError):
    """A server cannot be reached, broke off, or does not speak HTTP; may pass."""

    transient = True


class UpstreamLate(UpstreamBroken):
    """A server has not answered when the time for it was over."""


class Receiver(Protocol):
    """Takes an answer as it arrives: where it comes from, its head, its pieces, its end."""

    def comes_from(self, connection: Connection) -> None:
        """Note the connection; called again, before anything else, when the request is sent once more."""

    def head(self, status: int, headers: Headers) -> None: ...

    def piece(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class Page(NamedTuple):
    """An answer that was read to its end."""

    status: int
    headers: Headers
    body: bytes


class Upstream:
    """Sends requests to servers; without a limit on connections."""

    def __init__(self, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._kept: dict[Address, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in self._open:
            connection.abort()
        while self._open:  # noqa: ASYNC110  what was aborted is closed in the event loop's next rounds
            await asyncio.sleep(0)

    async def send(self, address: Address, request: bytes, receiver: Receiver) -> None:
        """Send a request, made by :func:`request_of`; return when its answer has ended.

        :raises UpstreamBroken: no connection, no HTTP, or an answer that ends early.
        """
        connection = self._keeps(address)
        if connection is not None and await self._carry(connection, address, request, receiver):
            return
        if not await self._carry(await self._connect(address), address, request, receiver):
            raise UpstreamBroken("It closed the connection without an answer")

    async def page(
        self,
        method: str,
        address: Address,
        target: bytes,
        fields: bytes,
        body: bytes | None = None,
        *,
        limit: int,
        within: float = math.inf,
    ) -> Page:
        """Send a request and return its whole answer.

        :raises UpstreamBroken: as :meth:`send`; or the answer is larger than ``limit`` bytes.
        :raises UpstreamLate: it has not ended after ``within`` seconds; connecting may take longer.
        """
        collector = _Collector(limit)
        timer = None if within == math.inf else self._loop.call_later(within, collector.late)
        try:
            await self.send(address, request_of(method, address, target, fields, body), collector)
        finally:
            if timer is not None:
                timer.cancel()
        return collector.page()

    def _keeps(self, address: Address) -> Connection | None:
        kept = self._kept.get(address)
        oldest = self._loop.time() - _KEEP_ALIVE_SECONDS
        while kept:
            connection = kept.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                connection = await self._first_of(address)
        except TimeoutError:
            raise UpstreamBroken(f"It takes no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise UpstreamBroken(str(error)) from error
        if not connection.closed:
            self._open.add(connection)
        return connection

    async def _first_of(self, address: Address) -> Connection:
        """Connect to the first address of a name that takes a connection.

        Names are looked up here: of a lookup within ``create_connection`` that fails when nobody waits any more, uvloop
        writes a trace.
        """
        refused: OSError | None = None
        for family, _, _, _, where in await self._loop.getaddrinfo(address.host, address.port, type=SOCK_STREAM):
            try:
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, self._open),
                    str(where[0]),
                    address.port,
                    family=family,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else address.host,
                )
            except OSError as error:
                refused = refused or error
            else:
                return connection
        raise refused or OSError("Its name has no address")

    async def _carry(self, connection: Connection, address: Address, request: bytes, receiver: Receiver) -> bool:
        """Return False when a kept connection turned out to be closed."""
        try:
            answered = await connection.carry(request, receiver)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            self._kept.setdefault(address, []).append(connection)
            if self._sweeping is None:
                self._sweep_later()
        else:
            connection.abort()
        return answered

    def _sweep_later(self) -> None:
        self._sweeping = self._loop.call_later(_KEEP_ALIVE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close what was not used for long, of servers that are gone as well."""
        self._sweeping = None
        oldest = self._loop.time() - _KEEP_ALIVE_SECONDS
        for address, connections in list(self._kept.items()):
            fresh = [one for one in connections if not one.closed and one.idle_since > oldest]
            for connection in set(connections).difference(fresh):
                connection.abort()
            if fresh:
                self._kept[address] = fresh
            else:
                del self._kept[address]
        if self._kept:
            self._sweep_later()


class Connection(asyncio.Protocol):
    """One connection to a server; carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: set[Connection]) -> None:
        self._loop = loop
        self._all = connections
        self._transport: asyncio.Transport
        self._parser: Any = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[bool] | None = None
        self._used = False
        self._heard = False
        self._headers: Headers = []
        self._head_size = 0
        self._in_body = False
        self._until_close = False
        self.closed = False
        self.reusable = False
        self.idle_since = 0.0

    async def carry(self, request: bytes, receiver: Receiver) -> bool:
        """Send a request and give its answer to ``receiver``; return False when the connection was closed before.

        :raises UpstreamBroken: no HTTP, or an answer that ends early.
        """
        done = self._done = self._loop.create_future()
        self._receiver = receiver
        receiver.comes_from(self)
        self.reusable = self._heard = self._in_body = False
        self._head_size = 0
        if self._transport.is_closing():
            return False
        self._transport.write(request)
        answered: bool = await done
        return answered

    def fail(self, error: Exception) -> None:
        """End what is carried with an error; harmless when nothing is."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        self._receiver = None
        if not self.closed:
            self.closed = True
            self._transport.abort()

    # ------------------------------------------------------------------------------------------- the event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # nobody asked
            return
        self._heard = True
        self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, EmsError):
                log.exception("An answer failed by a defect of ours")
            self.fail(UpstreamBroken(str(error.__context__ or f"It does not speak HTTP/1.1: {error}")))
            return
        if self._head_size > HEAD_LIMIT and self._receiver is not None:
            self.fail(UpstreamBroken(f"The head of its answer, or its trailer, is larger than {HEAD_LIMIT} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._all.discard(self)
        done = self._done
        if done is None or done.done():
            return
        if self._in_body and self._until_close and error is None:
            try:
                self._end()
            except UpstreamBroken as broken:
                done.set_exception(broken)
        elif self._used and not self._heard:
            done.set_result(False)
        else:
            when = "amid its answer" if self._heard else "without an answer"
            done.set_exception(UpstreamBroken(f"It closed the connection {when}" + (f": {error}" if error else "")))

    # ----------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        if self._receiver is None:  # a second answer to one request
            raise UpstreamBroken("It sends more than one answer")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return  # the answer proper is still to come
        if not 200 <= status <= 599:
            raise UpstreamBroken(f"The answer has the status {status}")
        self._in_body = True
        self._until_close = status not in (204, 304) and not any(
            name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self._headers
        )
        assert self._receiver is not None
        self._receiver.head(status, self._headers)

    def on_body(self, piece: bytes) -> None:
        self._head_size = 0
        if self._receiver is not None:
            self._receiver.piece(piece)

    def on_message_complete(self) -> None:
        if self._in_body:
            self.reusable = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()
            self._end()

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._used = True
        self.idle_since = self._loop.time()
        if receiver is not None and self._done is not None and not self._done.done():
            receiver.end()
            self._done.set_result(True)


class _Collector:
    """Keeps a whole answer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._pieces: list[bytes] = []
        self._status = 0
        self._headers: Headers = []
        self._source: Connection | None = None
        self._late = False

    def comes_from(self, connection: Connection) -> None:
        self._source = connection
        if self._late:
            raise _late()

    def late(self) -> None:
        """End the request; one that has no connection yet, when it gets it or the time for that is over."""
        self._late = True
        if self._source is not None:
            self._source.fail(_late())

    def head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers

    def piece(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise UpstreamBroken(f"The answer is larger than {self._limit} bytes")
        self._pieces.append(data)

    def end(self) -> None: ...

    def page(self) -> Page:
        return Page(self._status, self._headers, b"".join(self._pieces))


def _late() -> UpstreamLate:
    return UpstreamLate("It does not answer in time")


def request_of(method: str, address: Address, target: bytes, fields: bytes, body: bytes | None = None) -> bytes:
    """Return a request as it goes over the wire; ``fields`` are header lines other than Host and Content-Length."""
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (method.encode(), target, str(address).encode(), fields)
    if body is None:
        return head + b"\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
