"""The gate of a running router, and what keeps it up to date: files that are watched, an issuer that is asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from ems import files
from ems.errors import ConfigError
from ems.files import WatchedFiles
from ems.http import key_set
from ems.http.bearer import Tokens
from ems.http.headers import Forwarding
from ems.http.key_set import KeySetUrl
from ems.router.admission.gate import CREDENTIALS, Gate
from ems.router.admission.keys import KeyFile, Keys, bearer_of
from ems.router.admission.settings import AdmissionConfig
from ems.router.admission.shared_limits import RedisLimits

_URLS = ("https://", "http://")


class Admission:
    """What requests pass; the constructor reads all files.

    :raises ConfigError: a file cannot be used.
    """

    def __init__(self, config: AdmissionConfig, watched: WatchedFiles, *, takes_limits: bool = True) -> None:
        self._takes_limits = takes_limits
        self.issuer: KeySetUrl | None = None
        """Who has to be asked for the keys of tokens."""
        self._redis = None if config.limits_redis is None else RedisLimits(config.limits_redis)
        tokens = None
        if config.tokens is not None:
            tokens = Tokens(config.tokens, partial(bearer_of, models_claim=config.tokens.models_claim))
            if config.tokens.key_set.startswith(_URLS):
                self.issuer = KeySetUrl(config.tokens.key_set, tokens)
            else:
                path = Path(config.tokens.key_set)
                watched.watch(path, partial(key_set.load, path, tokens))
        renew_keys = None if self.issuer is None else self.issuer.renew
        self.gate = Gate(config, tokens=tokens, renew_keys=renew_keys, shared=self._redis)
        if config.api_keys is not None:
            keys = Path(config.api_keys)
            watched.watch(keys, partial(self._load_keys, keys))
        self.forwarding = Forwarding(frozenset(), b"")
        if config.engine_key is not None:
            engine_key = Path(config.engine_key)
            watched.watch(engine_key, partial(self._load_engine_key, engine_key))
        elif config.authenticates and not config.forward_credentials:
            self.forwarding = Forwarding(frozenset(CREDENTIALS), b"")

    async def close(self) -> None:
        self.gate.close()
        if self._redis is not None:
            await self._redis.__aexit__()

    def _load_keys(self, path: Path) -> None:
        data = files.read(path, what="the file of API keys", secret=True)
        try:
            file = msgspec.json.decode(data, type=KeyFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no file of API keys: {error}") from None
        if not self._takes_limits and any(key.limit is not None for key in file.keys):
            raise ConfigError(
                f"{path} limits keys, and each of several --workers would take the limit: add --limits-redis"
            )
        self.gate.keys = Keys(file)

    def _load_engine_key(self, path: Path) -> None:
        key = files.read(path, what="the engines' key", secret=True).strip()
        if not key or not key.isascii() or any(byte <= 32 for byte in key):
            raise ConfigError(f"{path} is no key: expected one word of ASCII")
        self.forwarding = Forwarding(frozenset(CREDENTIALS), b"authorization: Bearer %b\r\n" % key)
