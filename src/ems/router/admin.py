"""Pages about the router itself: its health, its instances, and how those change while it runs."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ems.errors import ConfigError
from ems.router.config import Address
from ems.router.fleet import Fleet, Role
from ems.router.metrics import Counters
from ems.router.prober import Prober
from ems.router.reply import Refusal, Reply

log = logging.getLogger("ems.router")


class InstancesChange(msgspec.Struct):
    """Body of ``/instances/add`` and ``/instances/remove``."""

    type: Role
    instances: str | list[str]


_change = msgspec.json.Decoder(InstancesChange)


def read_change(body: bytes) -> tuple[Role, list[Address]]:
    """Return the role and the distinct instances that a change names.

    :raises Refusal: with status 400, saying what is wrong.
    """
    try:
        change = _change.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(
            400,
            'Expected {"type": "prefill" or "decode", "instances": "HOST:PORT" or a list of those}: ' + str(error),
            code="invalid_instances",
        ) from None
    names = [change.instances] if isinstance(change.instances, str) else change.instances
    if not names:
        raise Refusal(400, "No instance was named", code="invalid_instances", param="instances")
    try:
        return change.type, list(dict.fromkeys(Address.parse(name) for name in names))
    except ConfigError as error:
        raise Refusal(400, str(error), code="invalid_instances", param="instances") from None


class Admin:
    """Health pages and changes of the fleet."""

    def __init__(self, fleet: Fleet, counters: Counters, prober: Prober) -> None:
        self._fleet = fleet
        self._counters = counters
        self._prober = prober

    async def healthcheck(self, reply: Reply) -> None:
        await reply.json(
            200,
            {
                "status": "ok",
                "prefill_instances": len(self._fleet.listed(Role.PREFILL)),
                "decode_instances": len(self._fleet.listed(Role.DECODE)),
                "request_num": self._counters.running,
            },
        )

    async def health(self, reply: Reply) -> None:
        """Like an engine's page: 200 without a body while requests can be served, else 503."""
        await reply.whole(200 if self._fleet.serves(Role.DECODE) else 503)

    async def livez(self, reply: Reply) -> None:
        await reply.whole(200, b"ok\n", kind=b"text/plain; charset=utf-8")

    async def readyz(self, reply: Reply) -> None:
        ready = self._fleet.ready()
        lines = ["ready" if ready else "not ready: no decode instance is known to work"]
        for role in Role:
            for one in self._fleet.listed(role):
                state = "put aside" if not one.breaker.usable else "ok" if one.breaker.proven else "not yet known"
                lines.append(f"[{'+' if one.breaker.usable else '-'}] {role} {one.address} {state}")
        body = "\n".join(lines) + "\n"
        await reply.whole(200 if ready else 503, body.encode(), kind=b"text/plain; charset=utf-8")

    async def add(self, body: bytes, reply: Reply) -> None:
        role, addresses = read_change(body)
        now = asyncio.get_running_loop().time()
        added = [str(one) for one in addresses if self._fleet.add(role, one, now, trusted=False)]
        self._prober.wake()
        if added:
            log.info("Added %s instances: %s", role, ", ".join(added))
            message = f"Added {role} instances: {', '.join(added)}; each gets requests once it is healthy"
        else:
            message = f"The {role} instances were there already"
        await self._changed(message, reply)

    async def remove(self, body: bytes, reply: Reply) -> None:
        role, addresses = read_change(body)
        here = {one.address for one in self._fleet.listed(role)}
        unknown = [str(one) for one in addresses if one not in here]
        if unknown:
            raise Refusal(
                404, f"No such {role} instance: {', '.join(unknown)}; nothing was removed", code="instance_not_found"
            )
        for address in addresses:
            self._fleet.remove(role, address)
        names = ", ".join(map(str, addresses))
        log.info("Removed %s instances: %s", role, names)
        await self._changed(f"Removed {role} instances: {names}; requests that run there will finish", reply)

    async def _changed(self, message: str, reply: Reply) -> None:
        await reply.json(
            200,
            {
                "message": message,
                "current_prefill_instances": [str(one.address) for one in self._fleet.listed(Role.PREFILL)],
                "current_decode_instances": [str(one.address) for one in self._fleet.listed(Role.DECODE)],
            },
        )
