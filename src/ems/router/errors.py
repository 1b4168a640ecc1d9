"""What the router itself tells a client that something is wrong, in OpenAI's form.

``{"error": {"message", "type", "param", "code"}}`` as a body, or as an event when a stream has begun.  Errors of the
engines never come through here: they keep their own status and bytes.  No message names an instance, since clients
have no business with addresses behind the router; those stand in the log.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from ems.errors import EmsError

_encode = msgspec.json.Encoder().encode

EVENT_END = b"data: [DONE]\n\n"


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

    def body(self) -> bytes:
        return error_body(self.status, self.message, code=self.code, param=self.param)


class UpstreamBroken(EmsError, ConnectionError):
    """An instance cannot be reached, broke off, or does not speak HTTP; may pass."""

    transient = True


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
