"""Manifests in a file or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ems import files
from ems.errors import ConfigError
from ems.kubernetes.manifests import Manifests, read
from ems.kubernetes.objects import Resource

_SUFFIXES = frozenset((".yaml", ".yml", ".json"))


def files_of(path: Path) -> list[Path]:
    """A file itself, or the YAML and JSON files of a folder, without those of folders in it."""
    try:
        found = list(path.iterdir()) if path.is_dir() else None
    except OSError:
        found = None
    if found is None:  # a file, or what cannot be read, as reading it will say
        return [path]
    return sorted(one for one in found if one.suffix in _SUFFIXES and not one.name.startswith("."))


def load(path: Path, resources: Sequence[Resource]) -> Manifests:
    """Read a file or a folder.

    :raises ConfigError: one of its files cannot be read or is wrong, or there is none.
    """
    texts = {}
    for file in files_of(path):
        try:
            texts[str(file)] = files.read(file, what="the manifest").decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{file} is no text in UTF-8") from None
    if not texts:
        raise ConfigError(f"There are no manifests in {path}: expected files ending in .yaml, .yml or .json")
    return read(texts, resources)
