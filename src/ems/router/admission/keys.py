"""Who sends a request.  API keys: a file of hashes says whom a key belongs to, which models it may use, and how much.

A key is 256 random bits, so one SHA-256 keeps it: nobody guesses what is behind a hash, and a slow hash would cost each
request milliseconds.  A key is found by its hash, whose bytes a caller cannot choose, so how long that takes tells
nothing; the comparison that follows takes the same time for every key.

What always holds: no key is in here, only its hash; an expired key opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Any, Final

import msgspec

from ems.errors import ConfigError
from ems.kthena.rate_limit import RateLimit

FORMAT: Final = 1
EVERY_MODEL: Final = "*"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key: its name in logs, its hash, whose it is, and what it allows."""

    id: str
    sha256: str
    user: str = ""
    """Who shares the queue fairly with others, and a limit with keys of the same user; the key's id when empty."""
    models: tuple[str, ...] = (EVERY_MODEL,)
    """Names of models; ``*`` is every model, and a name that ends in ``*`` all that begin like it."""
    limit: RateLimit | None = None
    priority: int = 0
    """Lower goes first, as in vLLM; a request may ask for less, not for more."""
    administers: bool = False
    """Whether it opens the pages that change or explain the router."""
    expires: float | None = None
    """Seconds since 1970."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError("sha256 is no hash: expected the 64 digits that sha256sum prints, and nothing else")


class Principal(msgspec.Struct, frozen=True):
    """Who sends a request.  ``limit`` holds for ``scope``."""

    user: str
    models: tuple[str, ...] = (EVERY_MODEL,)
    priority: int = 0
    administers: bool = False
    scope: str = ""
    limit: RateLimit | None = None

    def may_use(self, model: str) -> bool:
        for name in self.models:
            if name in (EVERY_MODEL, model) or (name.endswith(EVERY_MODEL) and model.startswith(name[:-1])):
                return True
        return False


ANYBODY: Final = Principal("")
"""Who sends a request where nobody asks."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the file.

    :raises ConfigError: another format, a key named twice or wrongly.
    """

    format: int = FORMAT
    keys: tuple[ApiKey, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"The file of API keys has format {self.format}, this release knows {FORMAT}")
        names: set[str] = set()
        hashes: set[str] = set()
        for key in self.keys:
            if not _ID.fullmatch(key.id):
                raise ConfigError(f"An API key is called {key.id[:80]!r}: expected letters, digits and . _ @ + -")
            if key.id in names or key.sha256 in hashes:
                raise ConfigError(f"The API key {key.id} is there twice: name each key once")
            names.add(key.id)
            hashes.add(key.sha256)


class Keys:
    """The keys of one file, ready to be asked."""

    def __init__(self, file: KeyFile) -> None:
        self._keys = {bytes.fromhex(key.sha256): (key, _principal(key)) for key in file.keys}

    def recognise(self, key: bytes, wall: float) -> Principal | None:
        """Who sends ``key`` at ``wall`` seconds since 1970; None when it opens nothing."""
        digest = hashlib.sha256(key).digest()
        known, principal = self._keys.get(digest, _NOBODY)
        same = hmac.compare_digest(bytes.fromhex(known.sha256), digest)
        if not same or (known.expires is not None and wall >= known.expires):
            return None
        return principal


def _principal(key: ApiKey) -> Principal:
    return Principal(key.user or key.id, key.models, key.priority, key.administers, f"key/{key.id}", key.limit)


def bearer_of(claims: dict[str, Any], models_claim: str | None) -> Principal:
    """Who has a token with these claims; ``models_claim`` names the one with the models, if there is one."""
    models: tuple[str, ...] = (EVERY_MODEL,)
    if models_claim is not None:
        named = claims.get(models_claim, ())
        listed = named.split() if isinstance(named, str) else named
        models = tuple(str(name) for name in listed) if isinstance(listed, (list, tuple)) else ()
    user = claims["sub"].encode(errors="replace").decode()
    return Principal(user, models, scope=f"user/{user}")


_NOBODY: Final = (ApiKey(id="nobody", sha256=secrets.token_hex(32), expires=0.0), Principal(""))
