"""The HTTP client towards the engines.

What always holds: a failure of the other side is an :class:`UpstreamBroken`; an answer that is
closed, or a call that is cancelled, before the end closes its connection, which is how an engine learns that nobody
waits any more.
"""

from __future__ import annotations

import io
from typing import NamedTuple, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ems.errors import EmsError
from ems.router.config import Address
from ems.router.headers import Fields

# Engines behind uvicorn close idle connections after 5 s; ours must not be in use by then.
_KEEP_ALIVE_SECONDS = 4.0
_HEADER_LIMIT = 64 << 10
_LARGE_BODY = 1 << 20  # from here on written in parts, other requests in between
_NO_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class UpstreamBroken(EmsError, ConnectionError):
    """An instance cannot be reached, broke off, or does not speak HTTP; may pass."""

    transient = True


class Answer:
    """An answer whose head has arrived; its reader must close it."""

    __slots__ = ("_content", "_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self.status = response.status
        self.headers = response.raw_headers

    @property
    def ended(self) -> bool:
        return self._content.at_eof()

    async def read(self) -> bytes:
        """Return the next piece of the body as soon as there is one, ``b""`` at its end.

        :raises UpstreamBroken: the body ends early.
        """
        try:
            return await self._content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken(_reason(error)) from error

    def close(self) -> None:
        """Let go of the connection; it is closed unless the body was read to its end."""
        if not self._content.at_eof():  # after the whole body the connection is back in the pool already
            self._response.close()


class Page(NamedTuple):
    """An answer that was read to its end."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Upstream:
    """Sends requests to engines: one aiohttp session for all of them, without a limit on connections."""

    def __init__(self, connect_timeout: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=self._timeout,
            auto_decompress=False,
            skip_auto_headers=_NO_AUTOMATIC,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_HEADER_LIMIT,
            max_field_size=_HEADER_LIMIT,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self, method: str, address: Address, target: str, fields: Fields, body: bytes | None = None
    ) -> Answer:
        """Send a request to ``target`` (path and query, encoded) and return its answer's head.

        :raises UpstreamBroken: no connection, no answer, or no HTTP.
        """
        assert self._session is not None
        try:
            response = await self._session.request(
                method,
                URL(f"http://{address}{target}", encoded=True),
                data=body if body is None or len(body) < _LARGE_BODY else io.BytesIO(body),
                headers=CIMultiDict(fields),
                allow_redirects=False,
            )
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamBroken(_reason(error)) from error
        if not 200 <= response.status <= 599:
            response.close()
            raise UpstreamBroken(f"The answer has the status {response.status}")
        return Answer(response)

    async def page(
        self, method: str, address: Address, target: str, fields: Fields, body: bytes | None = None, *, limit: int
    ) -> Page:
        """:meth:`send`, and read the answer.

        :raises UpstreamBroken: as :meth:`send`; or it ends early, or is larger than ``limit`` bytes.
        """
        answer = await self.send(method, address, target, fields, body)
        try:
            pieces = []
            size = 0
            while piece := await answer.read():
                size += len(piece)
                if size > limit:
                    raise UpstreamBroken(f"The answer is larger than {limit} bytes")
                pieces.append(piece)
            return Page(answer.status, answer.headers, b"".join(pieces))
        finally:
            answer.close()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
