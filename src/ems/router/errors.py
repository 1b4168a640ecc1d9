"""What the router says when something is wrong.

Errors have OpenAI's form, ``{"error": {"message", "type", "param", "code"}}`` as a body, or as an event when a stream
has begun.  Those of the engines never come through here: they keep their own status and bytes.  No message names an
instance, since clients have no business with addresses behind the router; those stand in the log.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from ems.http.message import Refusal
from ems.http.reply import Reply

_EVENT_END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def refuse(reply: Reply, refusal: Refusal) -> None:
    body = _body(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
    reply.whole(refusal.status, body, extra=refusal.headers)


def _body(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    return _encode({"error": {"message": message, "type": _kind(status), "param": param, "code": code}})


def error_events(message: str, *, code: str, after: bytes) -> bytes:
    """Return what ends an event stream that cannot go on: an error event and the usual last one.

    ``after`` is the last piece that the client got; when it stops amid an event, that one is ended first.
    """
    gap = b"" if after.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n"
    return gap + b"data: " + _body(HTTPStatus.BAD_GATEWAY, message, code=code) + b"\n\n" + _EVENT_END


def _kind(status: int) -> str:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "service_unavailable_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
