"""Keeps the fleet and the routes as the manifests say: read at the start, when a file changes, and on SIGHUP.

What always holds: manifests that are wrong change nothing, and are complained of once; an instance that stays keeps its
load, its breaker and what it is known to have computed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ems.errors import ConfigError
from ems.router.config import Address, RouterConfig
from ems.router.fleet import Fleet, Role
from ems.router.kthena.inventory import places
from ems.router.kthena.manifests import SUFFIXES, Manifests, read
from ems.router.kthena.objects import ModelServer, seconds
from ems.router.kthena.routes import Routes

INTERVAL: Final = 2.0
"""Seconds between two looks at the files."""

log = logging.getLogger("ems.router")


class ManifestWatch:
    """What of the configuration comes from manifests."""

    def __init__(self, place: Path, config: RouterConfig, fleet: Fleet, draw: random.Random) -> None:
        self._place = place
        self._config = config
        self._fleet = fleet
        self._draw = draw
        self._seen: object = None
        self._asked = asyncio.Event()
        self.routes: Routes
        self.configs: Mapping[str, RouterConfig] = {}
        """The settings of each model server's requests."""

    def start(self, now: float) -> None:
        """Read the manifests for the first time.

        :raises ConfigError: they cannot be read, something in them is wrong, or no route is among them.
        """
        self._seen = self._signature()
        manifests = read(self._place)
        if not manifests.routes:
            raise ConfigError(f"no ModelRoute is in {self._place}, expected one at least, and its ModelServer")
        self._apply(manifests, now)

    def reload(self) -> None:
        self._seen = None
        self._asked.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._asked.wait()
            except TimeoutError:
                pass  # time to look
            self._asked.clear()
            signature = await asyncio.to_thread(self._signature)
            if signature == self._seen:
                continue
            self._seen = signature
            try:
                self._apply(await asyncio.to_thread(read, self._place), loop.time())
            except ConfigError as error:
                log.error("The manifests are not used, what runs stays: %s", error)  # noqa: TRY400  a person's mistake

    def _signature(self) -> object:
        files = sorted(self._place.iterdir()) if self._place.is_dir() else [self._place]
        found = []
        for file in files:
            if file.suffix in SUFFIXES or file == self._place:
                try:
                    status = file.stat()
                except OSError:
                    continue
                found.append((file.name, status.st_mtime_ns, status.st_size, status.st_ino))
        return found

    def _apply(self, manifests: Manifests, now: float) -> None:
        wanted: dict[tuple[Role, Address], dict[str, str]] = defaultdict(dict)
        for path, server in manifests.servers.items():
            for role, address, group in places(server, manifests.pods.values()):
                wanted[role, address][path] = group
        for role in Role:
            for instance in self._fleet.listed(role):
                if (role, instance.address) not in wanted:
                    self._fleet.remove(role, instance.address)
        for (role, address), groups in wanted.items():
            self._fleet.add(role, address, now, trusted=True)
            self._fleet.belongs(role, address, groups)
        self.configs = {path: _settings(self._config, server) for path, server in manifests.servers.items()}
        self.routes = Routes(manifests.routes, manifests.servers, self._draw)
        for path, route in manifests.routes.items():
            if route.spec.parent_refs:
                log.warning("The ModelRoute %s is for a Gateway (parentRefs) and is not used", path)
            limit = route.spec.rate_limit
            if limit is not None and limit.shared is not None and self._config.admission.limits_redis is None:
                text = (
                    "The ModelRoute %s shares its rateLimit by Redis, for which --limits-redis is not given: not shared"
                )
                log.warning(text, path)
        log.info(
            "Serving %d models by %d model servers with %d instances; %d objects of other kinds were passed over",
            len(self.routes.models),
            len(manifests.servers),
            len(wanted),
            manifests.passed_over,
        )


def _settings(config: RouterConfig, server: ModelServer) -> RouterConfig:
    """The router's own settings, with what the server's ``trafficPolicy`` says."""
    policy = server.spec.traffic_policy
    if policy.timeout is not None:
        timeout = seconds(policy.timeout, "timeout") or config.idle_timeout
        config = msgspec.structs.replace(config, prefill_timeout=timeout, idle_timeout=timeout)
    if policy.retry is not None:
        config = msgspec.structs.replace(
            config, max_retries=policy.retry.attempts, retry_delay=seconds(policy.retry.retry_interval, "retryInterval")
        )
    return config
