"""JSON Web Tokens: who a bearer is, when an issuer that the router trusts has signed it.

A token's signature is checked once, which takes some 60 microseconds, and then remembered by the token's hash until it
ends; what is remembered is bounded, and forgotten when the issuer's keys change.

What always holds: only asymmetric signatures count, so that nobody can sign with a public key; issuer, subject and end
must be there, and the audience where one is expected; a token opens nothing after its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Final

import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from ems.errors import ConfigError, EmsError
from ems.router.admission.keys import EVERY_MODEL, Principal

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "Ed25519", "EdDSA"),
)
SKEW_SECONDS: Final = 60
"""How far an issuer's clock may be ahead."""
MOST_REMEMBERED: Final = 8192
MOST_BYTES: Final = 16 << 10
"""Of a token; what is larger is none."""


class TokenRefused(EmsError):
    """A token opens nothing; the message says why, in words that a client may read."""


class KeyUnknown(TokenRefused):
    """A token names a key that the issuer did not have when it was asked last."""


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose tokens count.  ``models_claim`` names the claim with the models that a bearer may use, if there is one."""

    issuer: str
    audiences: tuple[str, ...] = ()
    key_set: str
    """A URL (``https://``, or ``http://`` within a trusted network) or a file with the issuer's JWKS."""
    models_claim: str | None = None

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


class Tokens:
    """Checks tokens of one issuer.  Times are seconds since 1970."""

    def __init__(self, settings: TokenSettings) -> None:
        self._settings = settings
        self._keys: KeySet | None = None
        self._known: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()
        audience: dict[str, Any] = {"essential": True, "values": list(settings.audiences)}
        self._claims: dict[str, Any] = {
            "iss": {"essential": True, "value": settings.issuer},
            "sub": {"essential": True},
            "exp": {"essential": True},
            **({"aud": audience} if settings.audiences else {}),
        }

    def use(self, keys: KeySet) -> None:
        self._keys = keys
        self._known.clear()

    def recognise(self, token: bytes, wall: float) -> Principal:
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

    def _check(self, token: bytes, wall: float) -> tuple[float, Principal]:
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
        models: tuple[str, ...] = (EVERY_MODEL,)
        if self._settings.models_claim is not None:
            named = claims.get(self._settings.models_claim, ())
            listed = named.split() if isinstance(named, str) else named
            models = tuple(str(name) for name in listed) if isinstance(listed, (list, tuple)) else ()
        user = claims["sub"].encode(errors="replace").decode()
        return ends, Principal(user, models, scope=f"user/{user}")
