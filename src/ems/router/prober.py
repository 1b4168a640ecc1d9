"""Asks instances for their health when the fleet wants to know it: new ones, failing ones, those that were put aside.

Any answer below 500 to ``GET /health`` is healthy, so that a server without that page counts as alive.
"""

from __future__ import annotations

import asyncio
import logging

from ems.http.client import Upstream, UpstreamBroken
from ems.router.fleet import Fleet, Instance

_PAGE_LIMIT = 1 << 20

log = logging.getLogger("ems.router")


class Prober:
    """One task for the whole fleet; :meth:`wake` it when the fleet may want a probe earlier than before."""

    def __init__(self, fleet: Fleet, upstream: Upstream, timeout: float) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._timeout = timeout
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as probes:
            while True:
                self._wanted.clear()
                for instance in self._fleet.due_probes(loop.time()):
                    probes.create_task(self._probe(instance))
                try:
                    async with asyncio.timeout_at(self._fleet.next_probe()):
                        await self._wanted.wait()
                except TimeoutError:
                    pass  # the next probe is due

    async def _probe(self, instance: Instance) -> None:
        try:
            failure = await self._ask(instance)
        except Exception:  # the root of the probe's task: a defect must not end the probing of all others
            log.exception("The probe of %s failed by a defect of the router", instance.address)
            failure = "it could not be probed"
        if failure is None:
            if instance.breaker.probe_passed():
                log.info("The %s instance %s is healthy and gets requests", instance.role, instance.address)
        elif self._fleet.probe_failed(instance, asyncio.get_running_loop().time()):
            log.warning("The %s instance %s is put aside: %s", instance.role, instance.address, failure)
        self.wake()

    async def _ask(self, instance: Instance) -> str | None:
        try:
            page = await self._upstream.page(
                "GET", instance.address, b"/health", b"", limit=_PAGE_LIMIT, within=self._timeout
            )
        except UpstreamBroken as error:
            return str(error)
        return f"/health answers {page.status}" if page.status >= 500 else None
