"""One answer to one client: how it is framed, and what the router itself says when something is wrong.

Errors have OpenAI's form, ``{"error": {"message", "type", "param", "code"}}`` as a body, or as an event when a stream
has begun.  Those of the engines never come through here: they keep their own status and bytes.  No message names an
instance, since clients have no business with addresses behind the router; those stand in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, Protocol

import msgspec

from ems.errors import EmsError

EVENT_END = b"data: [DONE]\n\n"

_STATUS_LINES: Final = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
_ID: Final = re.compile(rb"[ -~]{1,128}")
_BODILESS: Final = frozenset((HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED))

_encode = msgspec.json.Encoder().encode


class Refusal(EmsError):
    """The router answers a request itself, with an error.

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


class Outlet(Protocol):
    """What carries an answer to the client, in order; it never waits, and drops what nobody can receive any more."""

    def write(self, data: bytes) -> None: ...


class Source(Protocol):
    """Where an answer comes from as it is sent; told to wait when the client does not take it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Asked(Protocol):
    """What an answer depends on of its request."""

    @property
    def method(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...


class Reply:
    """Sends one answer: its head, its pieces, its end.

    ``status`` is None until its head is sent; an answer that is not ``ended`` when its request's task has ended is
    left visibly incomplete.
    """

    __slots__ = (
        "_chunked", "_date", "_keeps_alive", "_mute", "_source", "_version", "_write",
        "blocked", "client_left", "ended", "request_id", "status", "unframed",
    )  # fmt: skip

    def __init__(self, outlet: Outlet, asked: Asked, date: bytes, *, keeps_alive: bool) -> None:
        self._write = outlet.write
        self._date = date
        self._mute = asked.method == "HEAD"
        self._version = asked.version
        self._keeps_alive = keeps_alive
        self._chunked = False
        self._source: Source | None = None
        given = _find(asked.headers, b"x-request-id")
        self.request_id = given if given and _ID.fullmatch(given) else secrets.token_hex(16).encode()
        """The client's, if it can be kept and logged as it is."""
        self.status: int | None = None
        self.ended = False
        self.unframed = False
        """Whether nothing but the end of the connection tells the client where the answer ends."""
        self.blocked = False
        """Whether the client does not take what is sent."""
        self.client_left = False

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, sized: bool) -> None:
        """Send the head; ``sized``: the headers say how long the body is."""
        self.status = status
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines.extend(b"%b: %b\r\n" % pair for pair in headers)
        lines.append(b"date: %b\r\n" % self._date)
        if status in _BODILESS:
            self._mute = True
        elif not sized:
            self._chunked = self._version == "1.1"
            self.unframed = not self._chunked
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self._keeps_alive or self.unframed:
            lines.append(b"connection: close\r\n")
        elif self._version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._write(b"".join(lines))

    def piece(self, data: bytes) -> None:
        if self._mute:
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        self.ended = True
        self.comes_from(None)
        if self._chunked and not self._mute:
            self._write(b"0\r\n\r\n")

    def comes_from(self, source: Source | None) -> None:
        """Name where the pieces come from now, to be paused while the client does not take them.

        What they came from before goes on, since it may serve others.
        """
        before, self._source = self._source, source
        if self.blocked:
            if before is not None:
                before.resume()
            if source is not None:
                source.pause()

    def block(self) -> None:
        self.blocked = True
        if self._source is not None:
            self._source.pause()

    def unblock(self) -> None:
        self.blocked = False
        if self._source is not None:
            self._source.resume()

    def whole(
        self, status: int, body: bytes = b"", *, kind: bytes = b"application/json", extra: dict[str, str] | None = None
    ) -> None:
        fields = [(b"content-length", b"%d" % len(body)), (b"x-request-id", self.request_id)]
        if body:
            fields.append((b"content-type", kind))
        if extra:
            fields.extend((name.encode(), value.encode()) for name, value in extra.items())
        self.head(status, fields, sized=True)
        if body:
            self.piece(body)
        self.end()

    def json(self, status: int, value: object) -> None:
        self.whole(status, _encode(value))

    def refuse(self, refusal: Refusal) -> None:
        body = error_body(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
        self.whole(refusal.status, body, extra=refusal.headers)


def _find(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    return _encode({"error": {"message": message, "type": _kind(status), "param": param, "code": code}})


def error_events(message: str, *, code: str, after: bytes) -> bytes:
    """Return what ends an event stream that cannot go on: an error event and the usual last one.

    ``after`` is the last piece that the client got; when it stops amid an event, that one is ended first.
    """
    gap = b"" if after.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n"
    return gap + b"data: " + error_body(HTTPStatus.BAD_GATEWAY, message, code=code) + b"\n\n" + EVENT_END


def _kind(status: int) -> str:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "service_unavailable_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
