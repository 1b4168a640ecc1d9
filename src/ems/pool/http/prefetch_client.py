"""Hints to pool nodes of prompts that engines of their hosts will be asked for; ``prefetch_hints`` decides which.

What always holds: nobody waits for a hint, and none of them fails anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from ems import files
from ems.errors import ConfigError, Unauthorised
from ems.http.address import Address
from ems.http.client import Page, Upstream, UpstreamBroken
from ems.http.message import find
from ems.pool.http.prefetch_hints import MOST_PROMPT_TOKENS, HintOutcome, PoolNode, PrefetchHints, Prompt
from ems.pool.tenants import scram
from ems.pool.tenants.signed_requests import Challenge, Signed, sign

WITHIN_SECONDS: Final = 5.0
"""For a node to answer; connecting may take as long."""
_ANSWER_LIMIT: Final = 64 << 10
_OUTCOMES: Final = {200: HintOutcome.TAKEN, 503: HintOutcome.DROPPED}

log = logging.getLogger("ems.pool")

_encode = msgspec.json.Encoder().encode


class PrefetchClient:
    """One sender; an asynchronous context manager.  ``nodes`` are by the addresses of their hosts' engines."""

    def __init__(self, nodes: Mapping[Address, PoolNode], upstream: Upstream | None = None) -> None:
        self._nodes = nodes
        self._upstream = upstream or Upstream(WITHIN_SECONDS)
        self._hints = PrefetchHints()
        self._key = ""
        self._signing: dict[PoolNode, tuple[bytes, bytes]] = {}
        """The hashed key and the nonce by which requests to a node are signed."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._hints.counts

    def load_key(self, path: Path) -> None:
        """Read the nodes' token, or the tenants' key.

        :raises ConfigError: it cannot be read, or is not private.
        """
        key = files.read(path, what="the pool nodes' key", secret=True).strip()
        if not key or not key.isascii() or any(byte <= 32 for byte in key):
            raise ConfigError(f"{path} is no key: expected one word of ASCII")
        self._key = key.decode()
        self._signing.clear()

    async def __aenter__(self) -> Self:
        await self._upstream.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._upstream.__aexit__()

    def hint(self, engine: Address, model: str, tokens: Sequence[int]) -> bool:
        """An engine will be asked for a prompt that begins with these tokens; return whether its node gets a hint."""
        node = self._nodes.get(engine)
        loop = asyncio.get_running_loop()
        if node is None or not self._hints.begin(node, loop.time()):
            return False
        body = _encode(Prompt(list(tokens[:MOST_PROMPT_TOKENS]), model))
        task = loop.create_task(self._send(node, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _send(self, node: PoolNode, body: bytes) -> None:
        outcome, reason = HintOutcome.FAILED, "it could not be sent"
        try:
            page = await self._ask(node, body)
            outcome = _OUTCOMES.get(page.status, HintOutcome.REFUSED)
            reason = f"it answers {page.status}: {page.body[:200].decode(errors='replace')}"
        except (UpstreamBroken, Unauthorised) as error:
            reason = str(error)
        except Exception:  # the root of the hint's task: a defect must not pass for a node that is gone
            log.exception("A prefetch hint was not sent by a defect")
        if self._hints.ended(node, outcome, asyncio.get_running_loop().time()):
            log.warning("The pool node %s gets no prefetch hints for now: %s", node.address, reason)

    async def _ask(self, node: PoolNode, body: bytes) -> Page:
        if not node.tenant:
            return await self._post(node, f"Bearer {self._key}" if self._key else "", body)
        known = self._signing.get(node)
        page = await self._post(node, str(sign(node.tenant, *known, body) if known else Signed(node.tenant)), body)
        challenge = Challenge.parse((find(page.headers, b"www-authenticate") or b"").decode("latin-1"))
        if page.status == 401 and challenge is not None:
            salted = await asyncio.to_thread(scram.salted, self._key, challenge.salt, challenge.iterations)
            signing = self._signing[node] = salted, challenge.nonce
            page = await self._post(node, str(sign(node.tenant, *signing, body)), body)
        if page.status == 401:
            self._signing.pop(node, None)  # the node, or the file, may have another key of the tenant by now
        return page

    async def _post(self, node: PoolNode, credential: str, body: bytes) -> Page:
        fields = b"content-type: application/json\r\n"
        if credential:
            fields += b"authorization: %b\r\n" % credential.encode()
        return await self._upstream.page(
            "POST", node.address, b"/prefetch", fields, body, limit=_ANSWER_LIMIT, within=WITHIN_SECONDS
        )
