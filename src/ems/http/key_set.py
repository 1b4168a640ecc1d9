"""An issuer's public keys: from a file that is looked at, or from a URL that is asked each hour and when a key is new.

What always holds: a token with a made-up key id makes us ask at most once in ``LEAST_SECONDS``; an issuer that
does not answer changes nothing, and its keys that are known go on.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp

from ems import files
from ems.errors import ConfigError
from ems.http.bearer import Tokens, read_key_set

REFRESH_SECONDS = 3600.0
LEAST_SECONDS = 10.0
TIMEOUT = 5.0
_MAX_BYTES = 1 << 20

log = logging.getLogger("ems.http")


def load(path: Path, tokens: Tokens[Any]) -> None:
    """Take the keys of a JWKS in a file."""
    read = files.read(path, what="the key set")
    try:
        tokens.use(read_key_set(read))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


class KeySetUrl:
    """A JWKS behind a URL."""

    def __init__(self, url: str, tokens: Tokens[Any]) -> None:
        self._url = url
        self._tokens = tokens
        self._asking: asyncio.Task[bool] | None = None
        self._asked_at = float("-inf")

    async def run(self) -> None:
        """Ask now, again soon while there are no keys, and then each hour."""
        while True:
            known = await self.renew()
            await asyncio.sleep(REFRESH_SECONDS if known else LEAST_SECONDS)

    async def renew(self) -> bool:
        """Ask for the keys unless that was done just now; all who want to know it wait for one answer."""
        loop = asyncio.get_running_loop()
        if self._asking is None or self._asking.done():
            if loop.time() - self._asked_at < LEAST_SECONDS:
                return False
            self._asked_at = loop.time()
            self._asking = loop.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session,
                session.get(self._url) as answer,
            ):
                if answer.status != 200:
                    raise ConfigError(f"it answers {answer.status}")  # noqa: TRY301  said below, as what else fails
                self._tokens.use(read_key_set(await answer.content.read(_MAX_BYTES)))
        except (ConfigError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("The issuer's keys at %s cannot be had: %s", self._url, str(error) or type(error).__name__)
            return False
        return True
