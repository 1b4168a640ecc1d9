"""Manifests in a file or a folder, read again when something there changes.

What always holds: files count all together or not at all, so that a mistake in one changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ems.errors import ConfigError
from ems.router.admission import files
from ems.router.kthena.catalogue import Catalogue
from ems.router.kthena.manifests import Manifests, read
from ems.router.kthena.served import Served

_SUFFIXES = frozenset((".yaml", ".yml", ".json"))

log = logging.getLogger("ems.router")

Stamp = tuple[tuple[str, int, int, int], ...]


class Folder:
    """One file, or the YAML and JSON files of one folder, without those of folders in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> Stamp:
        """What is another one when something has changed."""
        stamps = []
        for path in self._files():
            try:
                facts = path.stat()
            except OSError:  # it went while we looked
                continue
            stamps.append((path.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return tuple(stamps)

    def read(self) -> Manifests:
        """Read all of it.

        :raises ConfigError: a file cannot be read or is wrong, or there is none.
        """
        found = self._files()
        if not found:
            raise ConfigError(f"There are no manifests in {self.path}: expected files ending in .yaml, .yml or .json")
        texts = {}
        for path in found:
            try:
                texts[str(path)] = files.read(path, what="the manifest").decode()
            except UnicodeDecodeError:
                raise ConfigError(f"{path} is no text in UTF-8") from None
        return read(texts)

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path] if self.path.exists() else []
        return sorted(
            path for path in self.path.iterdir() if path.suffix in _SUFFIXES and not path.name.startswith(".")
        )


class FolderSource:
    """Keeps what is served as the files say it."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self._seen: Stamp = ()
        self._asked = asyncio.Event()
        self._said: tuple[str, ...] = ()

    def start(self, served: Served, now: float) -> None:
        """Read the files for the first time.

        :raises ConfigError: something in them is wrong.
        """
        self._load(served, now, trusted=True)

    def wake(self) -> None:
        """Read the files again now, even when they look as before."""
        self._asked.set()

    async def run(self, served: Served) -> None:
        while True:
            try:
                async with asyncio.timeout(files.POLL_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                if self._folder.stamp() == self._seen:
                    continue
            self._asked.clear()
            try:
                self._load(served, asyncio.get_running_loop().time(), trusted=False)
            except ConfigError as error:
                log.error("%s; what was read before still counts", error)  # noqa: TRY400  a mistake in a file has no trace
            else:
                log.info("Read %s again", self._folder.path)

    def _load(self, served: Served, now: float, *, trusted: bool) -> None:
        self._seen = self._folder.stamp()  # before reading: what changes meanwhile is read once more
        manifests = self._folder.read()
        catalogue = Catalogue(manifests.objects, served.catalogue)
        if manifests.ignored != self._said:
            self._said = manifests.ignored
            for line in manifests.ignored:
                log.info("%s", line)
        served.apply(catalogue, now, trusted=trusted)
