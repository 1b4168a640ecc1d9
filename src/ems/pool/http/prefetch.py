"""``POST /prefetch``: who is about to send a prompt to an engine of this host has its pages brought up from the tiers.

The body is a :class:`~ems.pool.http.prefetch_hints.Prompt`.  The answer says what is asked for, and does not wait for
it.

What always holds: on an open node nobody is listened to who does not know the node's token, on a node with tenants
nobody but a tenant who signs, for pages of its own; nothing of a body is read before that; who sends one slowly keeps
nobody out; one prompt at a time is worked on, in steps between which the node serves its clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ems.errors import Unauthorised
from ems.pool.http.prefetch_hints import MOST_BYTES, Prompt
from ems.pool.protocol.limits import NONCE_BYTES
from ems.pool.tenants.signed_requests import SCHEME, Challenge, Signed

if TYPE_CHECKING:
    from starlette.requests import Request

    from ems.pool.node.pool_node import Node
    from ems.pool.service.prompts import Fetched

MOST_WAITING: Final = 16
"""Prompts that are here at a time, half of them of one tenant; more are refused."""
PAUSE_SECONDS: Final = 0.001
"""Between two steps."""


_decode = msgspec.json.Decoder(Prompt).decode


class PrefetchPage:
    """The page of one node; ``token`` is the open node's, empty where it has none."""

    def __init__(self, host: Node, token: str) -> None:
        self._host = host
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._turn = asyncio.Lock()
        self._waiting: Counter[str] = Counter()
        """Prompts by tenant, the one that is worked on among them."""

    async def __call__(self, request: Request) -> Response:
        gate = self._host.tenancy.gate
        given = request.headers.get("authorization", "")
        signed = Signed("")
        if gate.open:
            if not self._token or not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return _unauthorised("expected the token of this node's --http-token-file", "Bearer")
        else:
            parsed = Signed.parse(given)
            if parsed is None:
                return _unauthorised("expected a tenant's signature", SCHEME)
            signed = parsed
            if signed.nonce != self._nonce:
                challenge = Challenge(*gate.hashing(signed.access_id), self._nonce)
                return _unauthorised("expected a signature with this nonce", str(challenge))
            peer = request.client.host if request.client is not None else ""
            try:
                gate.recognise(
                    signed.access_id, signed.message, signed.proof, peer, self._host.clock(), self._host.wall()
                )
            except Unauthorised as error:
                return _unauthorised(str(error), SCHEME)
        if not self._host.tier_manager.states:
            return _mistake(409, "this node has no tier below memory from which pages could be brought")
        try:
            return await self._take(signed, await _read(request))
        except ClientDisconnect:
            return _mistake(400, "the body has no end")  # which nobody hears

    async def _take(self, signed: Signed, body: bytes) -> Response:
        tenant, waiting = signed.access_id, self._waiting
        if len(body) > MOST_BYTES:
            return _mistake(413, f"the body has more than {MOST_BYTES} bytes")
        if signed.digest and hashlib.sha256(body).digest() != signed.digest:
            return _unauthorised("the body is not the one that was signed", SCHEME)
        if waiting.total() >= MOST_WAITING or (tenant and waiting[tenant] >= MOST_WAITING // 2):
            return _mistake(503, "too many prompts wait")
        waiting[tenant] += 1
        try:
            async with self._turn:
                fetched = await self._fetch(tenant, _decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _mistake(400, f"the body is no prompt: {error}")
        finally:
            waiting[tenant] -= 1
            if not waiting[tenant]:
                del waiting[tenant]
        return _json(200, fetched._asdict())

    async def _fetch(self, tenant: str, prompt: Prompt) -> Fetched:
        steps = self._host.prompts.fetch(tenant, prompt.model, prompt.tokens)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                fetched: Fetched = end.value
                return fetched
            await asyncio.sleep(PAUSE_SECONDS)


async def _read(request: Request) -> bytes:
    """The body, or its beginning where that is too large."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            break
    return body


def _unauthorised(sentence: str, how: str) -> Response:
    return _json(401, {"error": sentence}, {"www-authenticate": how})


def _mistake(status: int, sentence: str) -> Response:
    return _json(status, {"error": sentence})


def _json(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
