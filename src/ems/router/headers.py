"""Which headers cross the router.

Hop-by-hop headers (RFC 9110, section 7.6.1) belong to one connection and stop here, in both directions, along with
those that the ``Connection`` header names.  Everything else crosses unchanged, the client's ``Authorization`` included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

RawHeaders = Iterable[tuple[bytes, bytes]]
Fields = list[tuple[str, str]]
"""Headers as the HTTP client takes them."""

_OF_PROXIES: Final = (b"proxy-authenticate", b"proxy-authorization", b"proxy-connection")
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", *_OF_PROXIES)
)
# The HTTP client writes its own; the request id is written by us, once.
_NOT_SENT: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
# A prefill's answer is read by the router, so it must come uncoded.
_NOT_TO_PREFILL: Final = _NOT_SENT | {b"accept", b"accept-encoding"}
# The HTTP server writes the date; the request id is written by us, once.
_NOT_RETURNED: Final = _HOP_BY_HOP | {b"date", b"x-request-id"}
# Keep proxies between us and the client from collecting or keeping the events.
_STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def find(headers: RawHeaders, name: bytes) -> bytes | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def sent(headers: RawHeaders, request_id: bytes, *, to_prefill: bool) -> Fields:
    dropped = _NOT_TO_PREFILL if to_prefill else _NOT_SENT
    connection = find(headers, b"connection")
    if connection is not None:
        dropped = dropped | _tokens(connection)
    kept = [(_text(key), _text(value)) for key, value in headers if key not in dropped]
    kept.append(("x-request-id", _text(request_id)))
    return kept


class Returned(NamedTuple):
    """The headers of an instance's answer as the client gets them, and what they say about its body."""

    headers: list[tuple[bytes, bytes]]
    is_event_stream: bool
    is_encoded: bool
    """Whether the body is compressed, so that nothing can be appended to it."""
    kind: bytes | None
    """The content type."""


def returned(headers: RawHeaders, request_id: bytes) -> Returned:
    kept = []
    present = {}
    for pair in headers:
        name = pair[0].lower()
        present[name] = pair[1]
        if name not in _NOT_RETURNED:
            kept.append(pair)
    connection = present.get(b"connection")
    if connection is not None:
        named = _tokens(connection)
        kept = [pair for pair in kept if pair[0].lower() not in named]
    kept.append((b"x-request-id", request_id))
    kind = present.get(b"content-type")
    streams = kind is not None and kind.lower().startswith(b"text/event-stream")
    if streams:
        kept.extend(pair for pair in _STREAM_HEADERS if pair[0] not in present)
    coding = present.get(b"content-encoding", b"").strip().lower()
    return Returned(kept, streams, coding not in (b"", b"identity"), kind)


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


def _text(raw: bytes) -> str:
    """Decode such that the HTTP client, which writes UTF-8, writes the same bytes wherever they are UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
