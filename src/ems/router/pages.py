"""Pages beside the completions: the router's health, its instances and how they change, and what concerns all of them.

Instances are asked all at once, each for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import unquote

import msgspec
from msgspec import Raw

from ems.engines.pages import models_of
from ems.errors import ConfigError
from ems.http import headers
from ems.http.address import Address
from ems.http.client import Page, UpstreamBroken
from ems.http.message import Refusal, Request
from ems.http.reply import Reply
from ems.router.exchange import Parts
from ems.router.fleet import Instance, Role

_PAGE_LIMIT = 16 << 20

log = logging.getLogger("ems.router")


class InstancesChange(msgspec.Struct):
    """Body of ``/instances/add`` and ``/instances/remove``."""

    type: Role
    instances: str | list[str]


_change = msgspec.json.Decoder(InstancesChange)
_encode = msgspec.json.Encoder().encode


def read_change(body: bytes) -> tuple[Role, list[Address]]:
    """Return the role and the distinct instances that a change names.

    :raises Refusal: with status 400, saying what is wrong.
    """
    try:
        change = _change.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        expected = 'Expected {"type": "prefill" or "decode", "instances": "HOST:PORT" or a list of those}'
        raise Refusal(400, f"{expected}: {error}", code="invalid_instances") from None
    names = [change.instances] if isinstance(change.instances, str) else change.instances
    if not names:
        raise Refusal(400, "No instance was named", code="invalid_instances", param="instances")
    try:
        return change.type, list(dict.fromkeys(Address.parse(name) for name in names))
    except ConfigError as error:
        raise Refusal(400, str(error), code="invalid_instances", param="instances") from None


def merged(bodies: Sequence[bytes]) -> bytes:
    """Join lists of models; a model that several instances have is listed once, as the first one describes it.

    A body that is no such list adds nothing.
    """
    models: dict[str, Raw] = {}
    for body in bodies:
        for name, model in models_of(body).items():
            models.setdefault(name, model)
    return _encode({"object": "list", "data": list(models.values())})


def no_request() -> Refusal:
    message = "There is no such request, or it is too long ago; one that runs is listed when it has ended"
    return Refusal(404, message, code="request_not_found")


class Pages:
    """Each method is one page."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._fleet = parts.fleet

    def healthcheck(self, reply: Reply) -> None:
        instances = {f"{role}_instances": len(self._fleet.listed(role)) for role in Role}
        reply.json(200, {"status": "ok", **instances, "request_num": self._parts.counters.running})

    def health(self, reply: Reply) -> None:
        """Like an engine's page: 200 without a body while requests can be served, else 503."""
        reply.whole(200 if self._fleet.usable(Role.DECODE) else 503)

    def livez(self, reply: Reply) -> None:
        reply.whole(200, b"ok\n", kind=b"text/plain; charset=utf-8")

    def readyz(self, reply: Reply) -> None:
        ready = self._fleet.ready()
        lines = ["ready" if ready else "not ready: no decode instance is known to work"]
        for role in Role:
            for one in self._fleet.listed(role):
                state = "put aside" if not one.breaker.usable else "ok" if one.breaker.proven else "not yet known"
                lines.append(f"[{'+' if one.breaker.usable else '-'}] {role} {one.address} {state}")
        body = "\n".join(lines) + "\n"
        reply.whole(200 if ready else 503, body.encode(), kind=b"text/plain; charset=utf-8")

    def decisions(self, _: Request, reply: Reply) -> None:
        reply.json(200, {"requests": [one for _, one in self._parts.observer.decisions.newest()]})

    def decision(self, request: Request, reply: Reply) -> None:
        request_id = unquote(request.path.rpartition("/")[2])
        found = self._parts.observer.decisions.find(request_id)
        if found is None:
            raise no_request()
        reply.json(200, found)

    def add(self, request: Request, reply: Reply) -> None:
        self.changed(self.change(*read_change(request.body), listed=True), reply)

    def remove(self, request: Request, reply: Reply) -> None:
        self.changed(self.change(*self.removal(request), listed=False), reply)

    def removal(self, request: Request) -> tuple[Role, list[Address]]:
        role, addresses = read_change(request.body)
        here = {one.address for one in self._fleet.listed(role)}
        unknown = [str(one) for one in addresses if one not in here]
        if unknown:
            raise Refusal(
                404, f"No such {role} instance: {', '.join(unknown)}; nothing was removed", code="instance_not_found"
            )
        return role, addresses

    def change(self, role: Role, addresses: Sequence[Address], *, listed: bool, level: int = logging.INFO) -> str:
        """List instances, or remove those that are listed; return what an administrator is told."""
        if not listed:
            for address in addresses:
                self._fleet.remove(role, address)
            names = ", ".join(map(str, addresses))
            log.log(level, "Removed %s instances: %s", role, names)
            return f"Removed {role} instances: {names}; requests that run there will finish"
        now = asyncio.get_running_loop().time()
        added = [str(one) for one in addresses if self._fleet.add(role, one, now, trusted=False)]
        self._parts.prober.wake()
        if not added:
            return f"The {role} instances were there already"
        log.log(level, "Added %s instances: %s", role, ", ".join(added))
        return f"Added {role} instances: {', '.join(added)}; each gets requests once it is healthy"

    def changed(self, message: str, reply: Reply, **more: object) -> None:
        current = {f"current_{role}_instances": [str(one.address) for one in self._fleet.listed(role)] for role in Role}
        reply.json(200, {"message": message, **current, **more})

    async def models(self, request: Request, reply: Reply) -> None:
        asked = self._fleet.usable(Role.DECODE) + self._fleet.usable(Role.PREFILL)
        pages = await self._ask("GET", b"/v1/models", request, reply, asked)
        answered = [page for page in pages if page is not None]
        lists = [page.body for page in answered if page.status == 200]
        if lists:
            reply.whole(200, merged(lists))
        elif answered:
            kind = headers.returned(answered[0].headers, b"").kind or b"application/octet-stream"
            reply.whole(answered[0].status, answered[0].body, kind=kind)
        else:
            later = {"retry-after": "1"}
            raise Refusal(503, "No server is available; try again later", code="no_server", headers=later)

    async def reset_prefix_cache(self, request: Request, reply: Reply) -> None:
        asked = self._fleet.listed(Role.PREFILL) + self._fleet.listed(Role.DECODE)
        pages = await self._ask("POST", request.target, request, reply, asked)
        answers = zip(asked, pages, strict=True)
        failed = [str(instance.address) for instance, page in answers if page is None or page.status != 200]
        if failed:
            reply.json(502, {"message": "Some instances did not reset their prefix cache", "failed": failed})
        else:
            reply.json(200, {"message": f"Reset the prefix cache of {len(asked)} instances", "failed": []})

    async def _ask(
        self, method: str, target: bytes, request: Request, reply: Reply, instances: list[Instance]
    ) -> list[Page | None]:
        fields = headers.sent(
            request.headers, reply.request_id, read_here=True, forwarding=self._parts.admission.forwarding
        )
        return await asyncio.gather(*(self._one(method, target, fields, instance) for instance in instances))

    async def _one(self, method: str, target: bytes, fields: bytes, instance: Instance) -> Page | None:
        within = self._parts.config.probe_timeout
        try:
            return await self._parts.upstream.page(
                method, instance.address, target, fields, limit=_PAGE_LIMIT, within=within
            )
        except UpstreamBroken:
            return None
