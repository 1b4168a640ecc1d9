"""Follows resources on a Kubernetes API server, by lists and watches.

A small client over aiohttp instead of a Kubernetes library: a few resources are read, nothing is written, and the
libraries bring HTTP clients and models of hundreds of kinds for it.

What always holds: while the server is away what is known goes on to count; each wait is bounded; nothing counts
before all resources have been listed once; a watch that the server cannot continue begins with a list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from ems.kubernetes.access import ClusterAccess
from ems.kubernetes.credentials import Credentials, of_kubeconfig, of_pod
from ems.kubernetes.mirror import Mirror, WatchExpired, version_of
from ems.kubernetes.objects import Resource

PAGE: Final = 500
WATCH_SECONDS: Final = 290
CALL_SECONDS: Final = 30.0
LONGEST_PAUSE: Final = 30.0
MAX_LINE: Final = 4 << 20

log = logging.getLogger("ems.kubernetes")


class Informer:
    """Keeps a mirror of resources up to date."""

    def __init__(self, access: ClusterAccess, resources: Sequence[Resource]) -> None:
        self._credentials: Credentials = (
            of_kubeconfig(access.kubeconfig, access.context) if access.kubeconfig else of_pod()
        )
        self._tls = self._credentials.tls()
        self._namespace = access.namespace
        self.mirror = Mirror(resources)
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()

    def wake(self) -> None:
        """List all anew now."""
        self._asked.set()

    async def run(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` when all resources have been listed, and again after each change."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=WATCH_SECONDS + CALL_SECONDS)
        connector = aiohttp.TCPConnector(ssl=self._tls)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._tell(changed))
            while True:
                following = [tasks.create_task(self._follow(session, resource)) for resource in self.mirror.resources]
                await self._asked.wait()
                self._asked.clear()
                for one in following:
                    one.cancel()

    async def _tell(self, changed: Callable[[], None]) -> None:
        said: frozenset[str] = frozenset()
        while True:
            await self._changed.wait()
            self._changed.clear()
            problems = self.mirror.problems
            for problem in sorted(problems - said):
                log.error("%s; it counts as it was before", problem)
            said = problems
            if self.mirror.complete:
                changed()

    async def _follow(self, session: aiohttp.ClientSession, resource: Resource) -> None:
        version: str | None = None
        pause = 0.0
        while True:
            try:
                if version is None:
                    version = await self._list(session, resource)
                    pause = 0.0
                version = await self._watch(session, resource, version)
                pause = 0.0
            except WatchExpired:
                version = None
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                pause = min(max(pause * 2, 0.5), LONGEST_PAUSE)
                reason = str(error) or type(error).__name__
                log.warning("The API server did not give %s, asked again in %.1f s: %s", resource.plural, pause, reason)
            except Exception:  # the root of the task: a defect must not end the following
                pause = LONGEST_PAUSE
                log.exception("Following %s failed by a defect", resource.plural)
            # A server that ends each watch at once must not be asked without end.
            await asyncio.sleep((pause or 0.1) * random.uniform(0.5, 1.0))

    async def _list(self, session: aiohttp.ClientSession, resource: Resource) -> str:
        items: list[object] = []
        after = ""
        while True:
            query = {"limit": str(PAGE)} | ({"continue": after} if after else {})
            async with asyncio.timeout(CALL_SECONDS), self._get(session, resource, query) as answer:
                self._check(answer)
                page: Any = msgspec.json.decode(await answer.read())
            found = page.get("items") if isinstance(page, dict) else None
            version = version_of(page) if isinstance(page, dict) else None
            if version is None or not isinstance(found, list | None):
                raise ValueError("its answer is no list of objects")
            items.extend(found or ())
            after = page["metadata"].get("continue") or ""
            if not after:
                break
        self.mirror.listed(resource, items)
        self._changed.set()
        return version

    async def _watch(self, session: aiohttp.ClientSession, resource: Resource, version: str) -> str:
        """Follow the changes since ``version``; return how far they were followed when the server ends the watch."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._get(session, resource, query) as answer:
            self._check(answer)
            while line := (await answer.content.readline()).strip():
                version = self.mirror.event(resource, msgspec.json.decode(line)) or version
                self._changed.set()
        return version

    def _get(self, session: aiohttp.ClientSession, resource: Resource, query: dict[str, str]) -> Any:
        group = resource.api_version
        where = f"/namespaces/{self._namespace}" if self._namespace else ""
        base = f"/apis/{group}" if "/" in group else f"/api/{group}"
        headers = {"Accept": "application/json", **self._credentials.headers()}
        url = f"{self._credentials.server}{base}{where}/{resource.plural}"
        return session.get(url, params=query, headers=headers, allow_redirects=False)

    @staticmethod
    def _check(answer: aiohttp.ClientResponse) -> None:
        if answer.status == 410:
            raise WatchExpired("The server does not know this version any more")
        if answer.status != 200:
            hint = {401: ": it does not accept the token", 403: ": get, list and watch must be allowed"}
            raise ValueError(f"it answers {answer.status}{hint.get(answer.status, '')}")
