"""Which headers cross a proxy.

Hop-by-hop headers (RFC 9110, section 7.6.1) belong to one connection and stop here, in both directions, along with
those that the ``Connection`` header names.  Everything else crosses unchanged, but what :class:`Forwarding` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

RawHeaders = Iterable[tuple[bytes, bytes]]

_OF_PROXIES: Final = (b"proxy-authenticate", b"proxy-authorization", b"proxy-connection")
_NONE: Final[frozenset[bytes]] = frozenset()
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", *_OF_PROXIES)
)
# The HTTP client writes its own; the request id is written by us, once.
_NOT_SENT: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
# Of a request whose answer is read here, so that it must come uncoded.
_NOT_SENT_TO_READ: Final = _NOT_SENT | {b"accept", b"accept-encoding"}
# The HTTP server writes the date; the request id is written by us, once.
_NOT_RETURNED: Final = _HOP_BY_HOP | {b"date", b"x-request-id"}
# Keep proxies between us and the client from collecting or keeping the events.
_STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Forwarding(NamedTuple):
    """What servers do not get of a client's headers, and the header lines that they get instead."""

    withheld: frozenset[bytes]
    added: bytes


EVERYTHING: Final = Forwarding(frozenset(), b"")


def sent(headers: RawHeaders, request_id: bytes, *, read_here: bool, forwarding: Forwarding = EVERYTHING) -> bytes:
    """Return the header lines of a request to a server; ``read_here``: nobody gets its answer as it is."""
    dropped = _NOT_SENT_TO_READ if read_here else _NOT_SENT
    if forwarding.withheld:
        dropped = dropped | forwarding.withheld
    named = _named(headers)
    if named:
        dropped = dropped | named
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in dropped]
    lines.append(b"x-request-id: %b\r\n%b" % (request_id, forwarding.added))
    return b"".join(lines)


class Returned(NamedTuple):
    """The headers of a server's answer as the client gets them, and what they say about its body."""

    headers: list[tuple[bytes, bytes]]
    is_event_stream: bool
    is_encoded: bool
    """Whether the body is compressed, so that nothing can be appended to it."""
    kind: bytes | None
    """The content type."""
    is_sized: bool
    """Whether the headers say how long the body is; those of an event stream never do, since it may have to go on."""


def returned(headers: RawHeaders, request_id: bytes) -> Returned:
    kept = []
    present = {}
    for pair in headers:
        name = pair[0].lower()
        present[name] = pair[1]
        if name not in _NOT_RETURNED:
            kept.append(pair)
    named = _named(headers) if b"connection" in present else _NONE
    if named:
        kept = [pair for pair in kept if pair[0].lower() not in named]
    kept.append((b"x-request-id", request_id))
    kind = present.get(b"content-type")
    streams = kind is not None and kind.lower().startswith(b"text/event-stream")
    sized = b"content-length" in present and b"content-length" not in named
    if streams and sized:
        kept = [pair for pair in kept if pair[0].lower() != b"content-length"]
        sized = False
    if streams:
        kept.extend(pair for pair in _STREAM_HEADERS if pair[0] not in present)
    coding = present.get(b"content-encoding", b"").strip().lower()
    return Returned(kept, streams, coding not in (b"", b"identity"), kind, sized)


def _named(headers: RawHeaders) -> AbstractSet[bytes]:
    """What ``Connection`` names, however often it is there."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")} if values else _NONE
