"""A client's request as it arrived, and what must hold before anybody looks at it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ems.errors import EmsError

HEADERS_LIMIT: Final = 256
"""Most headers of a request."""

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in their order."""


class Refusal(EmsError):
    """A request is answered here, with an error.

    ``status`` is the HTTP status, ``code`` a word for programs, ``headers`` what the status calls for; ``kind`` is
    what metrics and logs call it, where ``code`` does not say it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.kind = kind


class Request:
    """One request: its head at once, its ``body`` when it is complete."""

    __slots__ = ("body", "headers", "keeps_alive", "method", "path", "peer", "target", "version")

    def __init__(self, method: str, target: bytes, headers: Headers, version: str, *, keeps_alive: bool) -> None:
        self.method = method
        self.target = target
        """Path and query as the client wrote them."""
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.headers = headers
        self.version = version
        self.keeps_alive = keeps_alive
        """Whether the client wants its connection kept for another request."""
        self.body = b""
        self.peer = ""
        """The client's address, or that of the proxy in front."""

    @property
    def awaits_continue(self) -> bool:
        return self.version == "1.1" and any(name == b"expect" for name, _ in self.headers)


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def check(request: Request) -> None:
    """Refuse what the parser lets pass and two readers could read differently.

    :raises Refusal: with status 400, 417, 431 or 501.
    """
    if len(request.headers) > HEADERS_LIMIT:
        message = f"The request has more than {HEADERS_LIMIT} headers"
        raise Refusal(431, message, code="head_too_large")
    hosts = 0
    for name, value in request.headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and (value.lower() != b"chunked" or request.version != "1.1"):
            raise Refusal(501, "The only transfer encoding here is chunked, in HTTP/1.1", code="unknown_encoding")
        elif name == b"expect" and value.lower() != b"100-continue":
            raise Refusal(417, "The only expectation here is 100-continue", code="unknown_expectation")
    if request.version not in ("1.0", "1.1"):
        raise Refusal(400, f"HTTP/{request.version} is not spoken here: expected 1.1", code="invalid_http")
    if hosts != 1 and (hosts or request.version == "1.1"):
        raise Refusal(400, f"The request has {hosts} Host headers: expected one", code="invalid_http")
    if not request.target.startswith(b"/"):
        raise Refusal(400, "The request's target is not a path", code="invalid_http")


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"The request body is larger than {limit} bytes", code="body_too_large")
