"""What a request has to keep to beyond its types and bounds: what has to add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ems.errors import ProtocolError
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import REF_BYTES
from ems.pool.protocol.greeting import NONCE_BYTES
from ems.pool.protocol.limits import CHECKSUM_BYTES, MAX_KEYS, TOKEN_BYTES
from ems.pool.protocol.messages import (
    Announce,
    Commit,
    Corrupt,
    Explain,
    Hello,
    Lookup,
    Miss,
    Prefetch,
    Request,
    Reserve,
    StillWriting,
)


def check_request(message: Request) -> None:
    for check in _CHECKS.get(type(message), ()):
        check(message)


def _check_hello(message: Hello) -> None:
    if len(message.nonce) not in (0, NONCE_BYTES):
        raise ProtocolError(f"a nonce of {len(message.nonce)} bytes, expected {NONCE_BYTES}")


def _check_keys(message: Lookup | Reserve | Explain | Prefetch | Announce) -> None:
    if len(message.keys) % KEY_BYTES:
        raise ProtocolError(f"{len(message.keys)} bytes of keys, expected a multiple of {KEY_BYTES}")


def _check_parent(message: Reserve) -> None:
    if len(message.parent) != KEY_BYTES:
        raise ProtocolError(f"a parent key of {len(message.parent)} bytes, expected {KEY_BYTES}")


def _check_refs(message: StillWriting) -> None:
    if len(message.refs) % REF_BYTES:
        raise ProtocolError(f"{len(message.refs)} bytes of references, expected a multiple of {REF_BYTES}")


def _check_miss(message: Miss) -> None:
    if not 0 <= message.keys <= MAX_KEYS:
        raise ProtocolError(f"a lookup of {message.keys} keys, expected 0 to {MAX_KEYS}")


def _check_commit(message: Commit) -> None:
    count = len(message.positions or ())
    if message.checksums and len(message.checksums) != CHECKSUM_BYTES * count:
        raise ProtocolError(
            f"{len(message.checksums)} bytes of checksums for {count} positions, expected {CHECKSUM_BYTES} each"
        )


def _check_corrupt(message: Corrupt) -> None:
    count = len(message.keys) // KEY_BYTES
    if not count or len(message.keys) % KEY_BYTES or len(message.refs) != count * REF_BYTES:
        raise ProtocolError(
            f"{len(message.keys)} bytes of keys and {len(message.refs)} of references to corrupt pages, expected at "
            f"least one page with {KEY_BYTES} and {REF_BYTES} bytes each"
        )


def _check_tail(message: Lookup) -> None:
    if message.tail is not None:
        _refuse_strange(message.tail)


def _check_tails(message: Reserve) -> None:
    count = len(message.keys) // KEY_BYTES
    for position, tail in (message.tails or {}).items():
        if not 0 <= position < count:
            raise ProtocolError(f"a tail of key {position}, expected 0 to {count - 1}")
        _refuse_strange(tail)


def _refuse_strange(tail: Tail) -> None:
    if len(tail.directory) != KEY_BYTES or not tail.tokens or len(tail.tokens) % TOKEN_BYTES:
        raise ProtocolError(f"a tail of {len(tail.tokens)} bytes, expected {TOKEN_BYTES} a token in a named directory")


_CHECKS: dict[type, tuple[Callable[[Any], None], ...]] = {
    Hello: (_check_hello,),
    Lookup: (_check_keys, _check_tail),
    Reserve: (_check_keys, _check_tails, _check_parent),
    Explain: (_check_keys,),
    Prefetch: (_check_keys,),
    Announce: (_check_keys,),
    Commit: (_check_commit,),
    Corrupt: (_check_corrupt,),
    StillWriting: (_check_refs,),
    Miss: (_check_miss,),
}
