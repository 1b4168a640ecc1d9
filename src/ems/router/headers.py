"""Which headers cross the router.

Hop-by-hop headers (RFC 9110, section 7.6.1) belong to one connection and stop here, in both directions, along with
those that the ``Connection`` header names.  Everything else crosses unchanged, the client's ``Authorization`` included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The HTTP client writes its own; the request id is written by us, once.
_NOT_SENT: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
# A prefill's answer is read by the router, so it must come uncoded.
_NOT_TO_PREFILL: Final = _NOT_SENT | {b"accept", b"accept-encoding"}
# The HTTP server writes the date; the request id is written by us, once.
_NOT_RETURNED: Final = _HOP_BY_HOP | {b"date", b"x-request-id"}


def find(headers: RawHeaders, name: bytes) -> bytes | None:
    """Return the first value of a header whose name is given in lower case."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def sent(headers: RawHeaders, request_id: bytes, *, to_prefill: bool) -> list[tuple[str, str]]:
    """Return the headers for an instance from those of the client (names in lower case, as ASGI has them)."""
    dropped = _NOT_TO_PREFILL if to_prefill else _NOT_SENT
    named = _named_by_connection(headers)
    kept = [(_text(key), _text(value)) for key, value in headers if key not in dropped and key not in named]
    kept.append(("x-request-id", _text(request_id)))
    return kept


def returned(headers: RawHeaders, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers for the client from those of an instance."""
    named = _named_by_connection(headers)
    kept = [
        (key, value) for key, value in headers if (lower := key.lower()) not in _NOT_RETURNED and lower not in named
    ]
    kept.append((b"x-request-id", request_id))
    if is_event_stream(headers):
        present = {key.lower() for key, _ in kept}
        kept.extend(pair for pair in _STREAM_HEADERS if pair[0] not in present)
    return kept


# Keep proxies between us and the client from collecting or keeping the events.
_STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def is_event_stream(headers: RawHeaders) -> bool:
    kind = find(headers, b"content-type")
    return kind is not None and kind.lower().startswith(b"text/event-stream")


def is_encoded(headers: RawHeaders) -> bool:
    """Whether the body is compressed, so that nothing can be appended to it."""
    coding = find(headers, b"content-encoding")
    return coding is not None and coding.strip().lower() not in (b"", b"identity")


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    value = find(headers, b"connection")
    if value is None or value in (b"keep-alive", b"close"):
        return frozenset()
    return frozenset(token.strip().lower() for token in value.split(b","))


def _text(raw: bytes) -> str:
    """Decode such that the HTTP client, which writes UTF-8, writes the same bytes wherever they are UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
