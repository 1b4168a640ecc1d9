"""JSON Web Tokens: who a bearer is, when an issuer that is trusted has signed it.

A token's signature is checked once, which takes some 60 microseconds, and then remembered by the token's hash until it
ends; what is remembered is bounded, and forgotten when the issuer's keys change.

What always holds: only asymmetric signatures count, so that nobody can sign with a public key; issuer, subject and end
must be there, and the audience where one is expected; a token opens nothing after its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from ems.errors import ConfigError, EmsError

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "Ed25519", "EdDSA"),
)
SKEW_SECONDS: Final = 60
"""How far an issuer's clock may be ahead."""
MOST_REMEMBERED: Final = 8192
MOST_BYTES: Final = 16 << 10
"""Of a token; what is larger is none."""


Bearer = TypeVar("Bearer")


class TokenRefused(EmsError):
    """A token opens nothing; the message says why, in words that a client may read."""


class KeyUnknown(TokenRefused):
    """A token names a key that the issuer did not have when it was asked last."""


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose tokens count."""

    issuer: str
    audiences: tuple[str, ...] = ()
    key_set: str
    """A URL (``https://``, or ``http://`` within a trusted network) or a file with the issuer's JWKS."""

    def __post_init__(self) -> None:
        if not self.issuer or not self.key_set:
            raise ConfigError("JSON Web Tokens need an issuer and a key set: give --jwt-issuer and --jwt-key-set")


def read_key_set(data: bytes) -> KeySet:
    """The public keys of a JWKS.

    :raises ConfigError: it is none.
    """
    try:
        decoded = msgspec.json.decode(data)
        keys: KeySet = KeySet.import_key_set(decoded)
    except (JoseError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'The key set is no JWKS, expected {{"keys": [...]}} with at least one key: {error}'
        ) from None
    return keys


class Tokens(Generic[Bearer]):
    """Checks tokens of one issuer; ``bearer_of`` says who has the claims of one.  Times are seconds since 1970."""

    def __init__(self, issuer: Issuer, bearer_of: Callable[[dict[str, Any]], Bearer]) -> None:
        self._bearer_of = bearer_of
        self._keys: KeySet | None = None
        self._known: OrderedDict[bytes, tuple[float, Bearer]] = OrderedDict()
        audience: dict[str, Any] = {"essential": True, "values": list(issuer.audiences)}
        self._claims: dict[str, Any] = {
            "iss": {"essential": True, "value": issuer.issuer},
            "sub": {"essential": True},
            "exp": {"essential": True},
            **({"aud": audience} if issuer.audiences else {}),
        }

    def use(self, keys: KeySet) -> None:
        self._keys = keys
        self._known.clear()

    def recognise(self, token: bytes, wall: float) -> Bearer:
        """Whose token this is.

        :raises KeyUnknown: asking for the issuer's keys again may help.
        :raises TokenRefused: it opens nothing.
        """
        digest = hashlib.sha256(token).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = self._check(token, wall)
            if len(self._known) > MOST_REMEMBERED:
                self._known.popitem(last=False)
        if wall >= known[0]:
            del self._known[digest]
            raise TokenRefused("the token has ended")
        return known[1]

    def _check(self, token: bytes, wall: float) -> tuple[float, Bearer]:
        if self._keys is None:
            raise KeyUnknown("the issuer's keys are not known yet")
        if len(token) > MOST_BYTES:
            raise TokenRefused("the token is too long")
        try:
            claims = jwt.decode(token, self._keys, algorithms=ALGORITHMS).claims
            jwt.JWTClaimsRegistry(now=int(wall), leeway=SKEW_SECONDS, **self._claims).validate(claims)
            ends = float(claims["exp"])
        except InvalidKeyIdError:
            raise KeyUnknown("the token names a key that the issuer does not have") from None
        except (JoseError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TokenRefused("the token is refused: " + str(error).encode("ascii", "replace").decode()) from None
        return ends, self._bearer_of(claims)
