"""Asks engines for the figures by which the plugins of Kthena's router choose, as long as a scheduler goes by them.

What always holds: without such a scheduler no engine is asked; an engine that is slow is not asked twice at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from ems.http.client import UpstreamBroken
from ems.router.exchange import Parts
from ems.router.fleet import Instance, Role

INTERVAL: Final = 1.0
"""Seconds between two questions for one page."""

_PAGE_LIMIT = 2 << 20

log = logging.getLogger("ems.router")


class Scraper:
    """One task for the whole fleet."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asking: set[tuple[Instance, bytes]] = set()
        self._silent: set[tuple[Instance, bytes]] = set()
        """Of whom the log says that they have no such page."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as scrapes:
            while True:
                usable = [one for role in Role for one in self._parts.fleet.usable(role)]
                wanted = {(one, path) for one in usable for path in self._parts.schedulers.read}
                self._silent &= wanted
                for instance, path in wanted - self._asking:
                    self._asking.add((instance, path))
                    scrapes.create_task(self._scrape(instance, path))
                await asyncio.sleep(INTERVAL)

    async def _scrape(self, instance: Instance, path: bytes) -> None:
        try:
            failure = await self._ask(instance, path)
        except Exception:  # the root of the scrape's task: a defect must not end the scraping of all others
            log.exception("The scrape of %s failed by a defect of the router", instance.address)
            failure = "it could not be read"
        finally:
            self._asking.discard((instance, path))
        if failure is None:
            self._silent.discard((instance, path))
        elif (instance, path) not in self._silent:
            self._silent.add((instance, path))
            name = path.decode()
            log.warning("%s of the %s instance %s is unknown: %s", name, instance.role, instance.address, failure)

    async def _ask(self, instance: Instance, path: bytes) -> str | None:
        parts = self._parts
        fields, within = parts.admission.forwarding.added, parts.config.probe_timeout
        try:
            page = await parts.upstream.page("GET", instance.address, path, fields, limit=_PAGE_LIMIT, within=within)
            if page.status != 200:
                return f"it answers {page.status}"
            instance.figures.take(path, page.body, asyncio.get_running_loop().time())
        except (UpstreamBroken, ValueError) as error:
            return str(error)
        return None
