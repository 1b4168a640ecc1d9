"""What a request may be beyond its types: how many keys, of which length, what has to add up.

Checked on both sides: a client is told of its mistake before it costs it the connection.
"""

from __future__ import annotations

from ems.errors import ProtocolError
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.protocol.greeting import MAX_ACCESS_ID, NONCE_BYTES
from ems.pool.protocol.messages import (
    Announce,
    Changes,
    Commit,
    Corrupt,
    Explain,
    Hello,
    Lookup,
    Miss,
    Prefetch,
    Request,
    Reserve,
)
from ems.pool.segments.layout import REF_BYTES

MAX_KEYS = 65536
"""Most keys of one request: a prompt of a million tokens in blocks of sixteen.  No request takes longer than these."""
TOKEN_BYTES = 4
MAX_TAIL = 64 << 10
"""Bytes of the tokens of one tail."""
CHECKSUM_BYTES = 4
MAX_CORRUPT = 64
"""Most pages of one :class:`Corrupt`: the node looks at the bytes of each."""


def check_request(message: Request) -> None:
    """See that a request keeps the limits.

    Raises:
        ProtocolError: it does not.
    """
    if isinstance(message, Hello):
        _check_credentials(message)
    if isinstance(message, Lookup | Reserve | Explain | Prefetch | Announce):
        if len(message.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(message.keys)} bytes of keys, expected a multiple of {KEY_BYTES}")
        _check_count(len(message.keys) // KEY_BYTES, "keys")
    if isinstance(message, Lookup | Reserve):
        _check_tail(message.tail)
    if isinstance(message, Reserve) and len(message.parent) != KEY_BYTES:
        raise ProtocolError(f"a parent key of {len(message.parent)} bytes, expected {KEY_BYTES}")
    if isinstance(message, Commit):
        _check_commit(message)
    if isinstance(message, Corrupt):
        _check_corrupt(message)
    if isinstance(message, Miss) and not 0 <= message.keys <= MAX_KEYS:
        raise ProtocolError(f"a lookup of {message.keys} keys, expected 0 to {MAX_KEYS}")
    if isinstance(message, Changes):
        _check_count(len(message.namespaces), "namespaces")


def _check_commit(message: Commit) -> None:
    count = len(message.positions or ())
    _check_count(count, "positions")
    if message.checksums and len(message.checksums) != CHECKSUM_BYTES * count:
        raise ProtocolError(
            f"{len(message.checksums)} bytes of checksums for {count} positions, expected {CHECKSUM_BYTES} each"
        )


def _check_corrupt(message: Corrupt) -> None:
    count = len(message.keys) // KEY_BYTES
    if len(message.keys) % KEY_BYTES or len(message.refs) != count * REF_BYTES or not 0 < count <= MAX_CORRUPT:
        raise ProtocolError(
            f"{len(message.keys)} bytes of keys and {len(message.refs)} of references to corrupt pages, expected 1 to "
            f"{MAX_CORRUPT} pages with {KEY_BYTES} and {REF_BYTES} bytes each"
        )


def _check_credentials(hello: Hello) -> None:
    if len(hello.access_id) > MAX_ACCESS_ID:
        raise ProtocolError(f"an access id of {len(hello.access_id)} characters, expected at most {MAX_ACCESS_ID}")
    if len(hello.nonce) not in (0, NONCE_BYTES):
        raise ProtocolError(f"a nonce of {len(hello.nonce)} bytes, expected {NONCE_BYTES}")


def _check_tail(tail: Tail | None) -> None:
    if tail is None:
        return
    if len(tail.directory) != KEY_BYTES or len(tail.tokens) % TOKEN_BYTES:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected {TOKEN_BYTES} a token in a named directory")
    if not 0 < len(tail.tokens) <= MAX_TAIL:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected at most {MAX_TAIL} and at least one token")


def _check_count(count: int, what: str) -> None:
    if count > MAX_KEYS:
        raise ProtocolError(f"{count} {what} in one request, expected at most {MAX_KEYS}")
