"""What the router was told about admission; nothing of it is on unless it is set."""

from __future__ import annotations

import math

import msgspec

from ems.errors import ConfigError
from ems.http.bearer import Issuer
from ems.kthena.rate_limit import RateLimit


class TokenSettings(Issuer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose JSON Web Tokens count."""

    models_claim: str | None = None
    """The claim with the models that a bearer may use, if there is one."""


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in, and how much at once.

    :raises ConfigError: a value out of its range.
    """

    api_keys: str | None = None
    """A file of API keys."""
    tokens: TokenSettings | None = None
    """Whose JSON Web Tokens count."""
    forward_credentials: bool = False
    """Whether engines get the client's credentials though the router asks for some of its own."""
    engine_key: str | None = None
    """A file with the key that engines get from the router."""
    limit: RateLimit | None = None
    """The limit of the router as a whole."""
    limits_redis: str | None = None
    """The URL of a Redis that routers share their limits through."""
    max_running: int = 0
    """Requests that run at once; 0 is as many as come."""
    queue_size: int = 1024
    """Requests that wait at once."""
    queue_timeout: float = 60.0
    """Seconds that a request waits at most."""
    fair_half_life: float = 300.0
    """Seconds after which what a user used counts half."""
    session_boost: float = 0.0
    """Seconds after an answer in which the session's next request goes first; 0 is never."""

    def __post_init__(self) -> None:
        for name, least in (("max_running", 0), ("queue_size", 0), ("session_boost", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be {least} or more")
        for name in ("queue_timeout", "fair_half_life"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be more than 0 seconds")

    @property
    def authenticates(self) -> bool:
        return self.api_keys is not None or self.tokens is not None
