"""One answer to one client: the ASGI ``send`` of a request, and what the router itself says when something is wrong.

Errors have OpenAI's form, ``{"error": {"message", "type", "param", "code"}}`` as a body, or as an event when a stream
has begun.  Those of the engines never come through here: they keep their own status and bytes.  No message names an
instance, since clients have no business with addresses behind the router; those stand in the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

from ems.errors import EmsError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EVENT_END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Refusal(EmsError):
    """The router answers a request itself, with an error.

    ``status`` is the HTTP status, ``code`` a word for programs, ``headers`` what the status calls for.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}


class Reply:
    """Sends one answer; ``status`` is None until its head is sent, ``sending`` while the client is waited for."""

    __slots__ = ("_send", "request_id", "sending", "status")

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self.request_id = request_id
        self.sending = False
        self.status: int | None = None

    async def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.sending = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.sending = False

    async def piece(self, body: bytes, *, more: bool) -> None:
        self.sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending = False

    async def whole(
        self, status: int, body: bytes = b"", *, kind: bytes = b"application/json", extra: dict[str, str] | None = None
    ) -> None:
        fields = [(b"content-length", b"%d" % len(body)), (b"x-request-id", self.request_id)]
        if body:
            fields.append((b"content-type", kind))
        if extra:
            fields.extend((name.encode(), value.encode()) for name, value in extra.items())
        await self.head(status, fields)
        await self.piece(body, more=False)

    async def json(self, status: int, value: object) -> None:
        await self.whole(status, _encode(value))

    async def refuse(self, refusal: Refusal) -> None:
        body = error_body(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
        await self.whole(refusal.status, body, extra=refusal.headers)


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
