"""Where the objects come from: manifests in a file or a folder, or an API server.

What always holds: files count all together or not at all, so that a mistake in one changes nothing; of a cluster, where
others write too, what is wrong counts as it was before.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ems.errors import ConfigError
from ems.kubernetes import folder
from ems.kubernetes.access import ClusterAccess
from ems.kubernetes.informer import Informer
from ems.router.kthena.catalogue import Catalogue
from ems.router.kthena.objects import RESOURCES
from ems.router.kthena.served import Served

log = logging.getLogger("ems.router")


class Folder:
    """One file, or the manifests of one folder."""

    def __init__(self, path: Path, served: Served) -> None:
        self._path = path
        self._served = served
        self._trusted = True
        """Whether instances may get requests before their first probe: those that are known from the start."""
        self._said: tuple[str, ...] = ()

    def load(self) -> None:
        """Serve what the files say.

        :raises ConfigError: one of them cannot be read or is wrong, or there is none.
        """
        found = folder.load(self._path, RESOURCES)
        with found.placed():
            catalogue = Catalogue(found.objects, self._served.catalogue)
            self._served.apply(catalogue, asyncio.get_running_loop().time(), trusted=self._trusted)
        self._trusted = False
        if found.ignored != self._said:
            self._said = found.ignored
            for line in found.ignored:
                log.info("Ignored what does not concern the router: %s", line)


class Cluster:
    """The objects of an API server."""

    def __init__(self, access: ClusterAccess, served: Served) -> None:
        self._served = served
        self.informer = Informer(access, RESOURCES)

    async def run(self) -> None:
        await self.informer.run(self._apply)

    def _apply(self) -> None:
        try:
            self._served.apply(Catalogue(self.informer.mirror.objects()), asyncio.get_running_loop().time())
        except ConfigError as error:
            log.error("%s; what was known before still counts", error)  # noqa: TRY400  a mistake in an object has no trace
