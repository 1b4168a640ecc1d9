"""Proof that both sides know an access key, without the key on the wire or on disk.

The construction of SCRAM-SHA-256 (RFC 5802 with RFC 7677).  The node keeps a verifier: from it nobody can prove
anything to the node, and to find the key behind it one must guess 256 random bits.  The message that both sides
sign is the whole greeting as it travelled, so nobody in between can change a version.

An access id and key, as an engine carries them around (:class:`Credentials`), are never shown and never logged.

This is written by hand because libraries do something else: scramp signs SASL's text messages and no others, knows one
key a user (a tenant has several while it rotates them), and would add half to the time of ``import ems``.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ems.errors import Unauthorised
from ems.pool.protocol.limits import MAX_CREDENTIAL

ITERATIONS = 4096
"""How often a key is hashed, the least that RFC 7677 allows.

Keys are random, so more would slow down engines that connect, and nobody else.
"""
MOST_ITERATIONS = 1 << 20
"""The most that a client does for a node: about half a second."""
SALT_BYTES = 16
ACCESS_ID = "ACCELERATE_ID"
ACCESS_KEY = "ACCELERATE_KEY"
DEFAULT_ID = "default"
"""Who a client is that names a key but no id."""
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Verifier(msgspec.Struct, frozen=True):
    """What the node knows of a key."""

    stored_key: Digest
    server_key: Digest


class Proof(msgspec.Struct, frozen=True):
    """What a client sends for a challenge, and what the node must answer."""

    proof: bytes
    signature: bytes


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _salted(key: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), salt, iterations)


def _xor(first: bytes, second: bytes) -> bytes:
    return (int.from_bytes(first) ^ int.from_bytes(second)).to_bytes(len(first))


def verifier(key: str, salt: bytes, iterations: int) -> Verifier:
    """What a node has to know so that the owner of ``key`` can prove it."""
    hashed = _salted(key, salt, iterations)
    return Verifier(hashlib.sha256(_hmac(hashed, b"Client Key")).digest(), _hmac(hashed, b"Server Key"))


def transcript(hello: bytes, challenge: bytes, protocol: bytes = b"ems-scram-sha-256") -> bytes:
    """What both sides sign: the bodies of the frames that went to and fro."""
    return b"".join(len(part).to_bytes(4) + part for part in (protocol, hello, challenge))


def prove(key: str, salt: bytes, iterations: int, message: bytes) -> Proof:
    """The answer of the owner of ``key`` to a challenge.

    Raises Unauthorised: as :func:`salted`.
    """
    return signed(salted(key, salt, iterations), message)


def salted(key: str, salt: bytes, iterations: int) -> bytes:
    """What the owner of ``key`` signs with.

    Raises Unauthorised: it is to be made with less or more work than is sensible.
    """
    if not ITERATIONS <= iterations <= MOST_ITERATIONS or len(salt) < SALT_BYTES:
        raise Unauthorised(
            f"the node asks for a key hashed {iterations} times with a salt of {len(salt)} bytes, expected "
            f"{ITERATIONS} to {MOST_ITERATIONS} times and at least {SALT_BYTES} bytes"
        )
    return _salted(key, salt, iterations)


def signed(salted_key: bytes, message: bytes) -> Proof:
    client_key = _hmac(salted_key, b"Client Key")
    mask = _hmac(hashlib.sha256(client_key).digest(), message)
    return Proof(_xor(client_key, mask), _hmac(_hmac(salted_key, b"Server Key"), message))


def proves(known: Verifier, message: bytes, proof: bytes) -> bool:
    """Whether ``proof`` of ``message`` was made with the key behind ``known``; takes as long either way."""
    client_key = _xor(proof, _hmac(known.stored_key, message))
    return hmac.compare_digest(hashlib.sha256(client_key).digest(), known.stored_key)


def signature(known: Verifier, message: bytes) -> bytes:
    return _hmac(known.server_key, message)


class Credentials(msgspec.Struct, frozen=True):
    """Who a client is, and what proves it; without a key it can only use an open node."""

    access_id: str = ""
    access_key: str = ""

    def __repr__(self) -> str:
        return f"Credentials(access_id={self.access_id!r}, access_key={'***' if self.access_key else ''!r})"

    @property
    def name(self) -> str:
        """The access id to be sent; empty when there is nothing to prove it with."""
        return (self.access_id or DEFAULT_ID)[:MAX_CREDENTIAL] if self.access_key else ""


def from_environment(environment: Mapping[str, str]) -> Credentials:
    return Credentials(environment.get(ACCESS_ID, ""), environment.get(ACCESS_KEY, ""))
