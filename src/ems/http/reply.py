"""One answer to one client, and how it is framed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, Protocol

import msgspec

from ems.http.message import Request, find

_STATUS_LINES: Final = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}
_ID: Final = re.compile(rb"[ -~]{1,128}")
_BODILESS: Final = frozenset((HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED))

_encode = msgspec.json.Encoder().encode


class Outlet(Protocol):
    """What carries an answer to the client, in order; it never waits, and drops what nobody can receive any more."""

    def write(self, data: bytes) -> None: ...


class Source(Protocol):
    """Where an answer comes from as it is sent; told to wait when the client does not take it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Reply:
    """Sends one answer: its head, its pieces, its end.

    ``status`` is None until its head is sent; an answer that is not ``ended`` when its request's task has ended is
    left visibly incomplete.
    """

    __slots__ = (
        "_chunked", "_date", "_head", "_keeps_alive", "_mute", "_source", "_version", "_write",
        "blocked", "client_left", "ended", "request_id", "status", "unframed",
    )  # fmt: skip

    def __init__(self, outlet: Outlet, request: Request, date: bytes, *, keeps_alive: bool) -> None:
        self._write = outlet.write
        self._date = date
        self._mute = request.method == "HEAD"
        self._version = request.version
        self._keeps_alive = keeps_alive
        self._chunked = False
        self._head = b""
        """What goes out with the first piece, or with the end."""
        self._source: Source | None = None
        given = find(request.headers, b"x-request-id")
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
        """Send the head with what follows; ``sized``: the headers say how long the body is."""
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
        self._head = b"".join(lines)

    def piece(self, data: bytes) -> None:
        if self._mute:
            return
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        self.ended = True
        self.comes_from(None)
        last = b"0\r\n\r\n" if self._chunked and not self._mute else b""
        if last or self._head:
            self._send(last)

    def _send(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

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
