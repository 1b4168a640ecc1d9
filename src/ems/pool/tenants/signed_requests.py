"""How a tenant signs a single request over HTTP, whose connection has greeted nobody: SCRAM's proof, in two headers.

::

    WWW-Authenticate: EMS-SCRAM-SHA-256 salt=..., iterations=..., nonce=...         what a request without a proof gets
    Authorization: EMS-SCRAM-SHA-256 id=..., nonce=..., digest=..., proof=...       hex, but for id and iterations

``nonce`` is the node's since its start, ``digest`` the body's SHA-256.  What always holds: the key never travels; a
proof is good for one body on one node until that is started again, and for no greeting over a socket.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple, Self

from ems.pool.protocol.limits import MAX_CREDENTIAL
from ems.pool.tenants import scram

SCHEME: Final = "EMS-SCRAM-SHA-256"
_HEX = r"([0-9a-f]{1,128})"
_CHALLENGE = re.compile(rf"{SCHEME} salt={_HEX}, iterations=(\d{{1,9}}), nonce={_HEX}")
_ID = rf"{SCHEME} id=([!-+\--~]{{1,{MAX_CREDENTIAL}}})"
_ASKING = re.compile(_ID)
_SIGNED = re.compile(rf"{_ID}, nonce={_HEX}, digest=([0-9a-f]{{64}}), proof=([0-9a-f]{{64}})")


class Challenge(NamedTuple):
    """What a node says to who has no proof."""

    salt: bytes
    iterations: int
    nonce: bytes

    def __str__(self) -> str:
        return f"{SCHEME} salt={self.salt.hex()}, iterations={self.iterations}, nonce={self.nonce.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        found = _CHALLENGE.fullmatch(text)
        salt, iterations, nonce = found.groups() if found is not None else ("", "", "0")
        if found is None or len(salt) % 2 or len(nonce) % 2:
            return None
        return cls(bytes.fromhex(salt), int(iterations), bytes.fromhex(nonce))


class Signed(NamedTuple):
    """Who asks, and what proves it; without a proof who would be asked for one."""

    access_id: str
    nonce: bytes = b""
    digest: bytes = b""
    proof: bytes = b""

    def __str__(self) -> str:
        who = f"{SCHEME} id={self.access_id}"
        if not self.proof:
            return who
        return f"{who}, nonce={self.nonce.hex()}, digest={self.digest.hex()}, proof={self.proof.hex()}"

    @property
    def message(self) -> bytes:
        return scram.transcript(self.access_id.encode(), self.nonce + self.digest, protocol=b"ems-scram-http")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        if asking := _ASKING.fullmatch(text):
            return cls(asking[1])
        found = _SIGNED.fullmatch(text)
        if found is None or len(found[2]) % 2:
            return None
        return cls(found[1], *map(bytes.fromhex, found.groups()[1:]))


def sign(access_id: str, salted_key: bytes, nonce: bytes, body: bytes) -> Signed:
    unsigned = Signed(access_id, nonce, hashlib.sha256(body).digest())
    return unsigned._replace(proof=scram.signed(salted_key, unsigned.message).proof)
