"""Manifests in a file or a folder.

What always holds: files count all together or not at all, so that a mistake in one changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ems.errors import ConfigError
from ems.router.admission import files
from ems.router.kthena.catalogue import Catalogue
from ems.router.kthena.manifests import read
from ems.router.kthena.served import Served

_SUFFIXES = frozenset((".yaml", ".yml", ".json"))

log = logging.getLogger("ems.router")


class Folder:
    """One file, or the YAML and JSON files of one folder, without those of folders in it."""

    def __init__(self, path: Path, served: Served) -> None:
        self._path = path
        self._served = served
        self._trusted = True
        """Whether instances may get requests before their first probe: those that are known from the start."""
        self._said: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        try:
            found = list(self._path.iterdir()) if self._path.is_dir() else None
        except OSError:
            found = None
        if found is None:  # a file, or what cannot be read, as reading it will say
            return [self._path]
        return sorted(path for path in found if path.suffix in _SUFFIXES and not path.name.startswith("."))

    def load(self) -> None:
        """Serve what the files say.

        :raises ConfigError: one of them cannot be read or is wrong, or there is none.
        """
        texts = {}
        for path in self.files():
            try:
                texts[str(path)] = files.read(path, what="the manifest").decode()
            except UnicodeDecodeError:
                raise ConfigError(f"{path} is no text in UTF-8") from None
        if not texts:
            raise ConfigError(f"There are no manifests in {self._path}: expected files ending in .yaml, .yml or .json")
        manifests = read(texts)
        catalogue = Catalogue(manifests.objects, self._served.catalogue)
        if manifests.ignored != self._said:
            self._said = manifests.ignored
            for line in manifests.ignored:
                log.info("%s", line)
        self._served.apply(catalogue, asyncio.get_running_loop().time(), trusted=self._trusted)
        self._trusted = False
