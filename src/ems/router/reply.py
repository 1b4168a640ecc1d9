"""One answer to one client: the ASGI ``send`` of a request, with what is the same in every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ems.router.errors import Refusal

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_encode = msgspec.json.Encoder().encode


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
        self,
        status: int,
        body: bytes = b"",
        *,
        kind: bytes = b"application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        fields = [(b"content-length", b"%d" % len(body)), (b"x-request-id", self.request_id)]
        if body:
            fields.append((b"content-type", kind))
        if headers:
            fields.extend((name.encode(), value.encode()) for name, value in headers.items())
        await self.head(status, fields)
        await self.piece(body, more=False)

    async def json(self, status: int, value: object) -> None:
        await self.whole(status, _encode(value))

    async def refuse(self, refusal: Refusal) -> None:
        await self.whole(refusal.status, refusal.body(), headers=refusal.headers)
