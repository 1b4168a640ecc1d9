"""Pages that concern every instance at once: the merged list of models, and the reset of the prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from ems.router import headers
from ems.router.fleet import Fleet, Instance, Role
from ems.router.reply import Refusal, Reply, Scope
from ems.router.upstream import Upstream, UpstreamBroken, read_whole

_PAGE_LIMIT = 16 << 20


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[Raw]


_model = msgspec.json.Decoder(_Model)
_model_list = msgspec.json.Decoder(_ModelList)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Page:
    """What one instance answered."""

    status: int
    kind: bytes
    body: bytes


def merged(bodies: Sequence[bytes]) -> bytes:
    """Join lists of models; a model that several instances have is listed once, as the first one describes it.

    A body that is no such list adds nothing.
    """
    models: dict[str, Raw] = {}
    for body in bodies:
        try:
            for model in _model_list.decode(body).data:
                models.setdefault(_model.decode(model).id, model)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return _encode({"object": "list", "data": list(models.values())})


class EveryInstance:
    """Asks all usable instances at once, each for a bounded time."""

    def __init__(self, fleet: Fleet, upstream: Upstream, timeout: float) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._timeout = timeout

    async def models(self, scope: Scope, reply: Reply) -> None:
        asked = self._fleet.usable(Role.DECODE) + self._fleet.usable(Role.PREFILL)
        pages = await self._ask("GET", "/v1/models", scope, reply, asked)
        answered = [page for page in pages if page is not None]
        lists = [page.body for page in answered if page.status == 200]
        if lists:
            await reply.whole(200, merged(lists))
        elif answered:
            await reply.whole(answered[0].status, answered[0].body, kind=answered[0].kind)
        else:
            raise Refusal(
                503, "No server is available; try again later", code="no_server", headers={"retry-after": "1"}
            )

    async def reset_prefix_cache(self, scope: Scope, reply: Reply) -> None:
        asked = self._fleet.listed(Role.PREFILL) + self._fleet.listed(Role.DECODE)
        query = scope["query_string"]
        target = "/reset_prefix_cache" + ("?" + query.decode("latin-1") if query else "")
        pages = await self._ask("POST", target, scope, reply, asked)
        failed = [
            str(instance.address)
            for instance, page in zip(asked, pages, strict=True)
            if page is None or page.status != 200
        ]
        if failed:
            await reply.json(500, {"message": "Some instances did not reset their prefix cache", "failed": failed})
        else:
            await reply.json(200, {"message": f"Reset the prefix cache of {len(asked)} instances", "failed": []})

    async def _ask(
        self, method: str, target: str, scope: Scope, reply: Reply, instances: list[Instance]
    ) -> list[Page | None]:
        fields = headers.sent(scope["headers"], reply.request_id, to_prefill=True)
        return await asyncio.gather(*(self._one(method, target, fields, instance) for instance in instances))

    async def _one(self, method: str, target: str, fields: list[tuple[str, str]], instance: Instance) -> Page | None:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._upstream.send(method, instance.address, target, fields)
                body = await read_whole(answer, _PAGE_LIMIT)
        except (UpstreamBroken, TimeoutError):
            return None
        kind = headers.returned(answer.headers, b"").kind
        return Page(answer.status, kind or b"application/octet-stream", body)
