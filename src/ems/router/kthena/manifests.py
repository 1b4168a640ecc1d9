"""Manifests from files: a folder (or file) of YAML documents becomes model servers, routes and pods.

What always holds: a document of these kinds that is wrong, or given twice, refuses the whole, with one sentence that
names file, object and place; documents of other kinds are somebody else's and are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from ems.errors import ConfigError
from ems.router.kthena.objects import GROUP, ModelRoute, ModelServer, Pod

KINDS: Final[dict[tuple[str, str], type[ModelServer | ModelRoute | Pod]]] = {
    (GROUP, "ModelServer"): ModelServer,
    (GROUP, "ModelRoute"): ModelRoute,
    ("v1", "Pod"): Pod,
}
LISTS: Final = ("List", "PodList", "ModelServerList", "ModelRouteList")
SUFFIXES: Final = (".yaml", ".yml", ".json")


class Manifests(msgspec.Struct, frozen=True):
    """All objects of a folder by ``namespace/name``; ``passed_over`` counts those of other kinds."""

    servers: dict[str, ModelServer]
    routes: dict[str, ModelRoute]
    pods: dict[str, Pod]
    passed_over: int = 0


def read(place: Path) -> Manifests:
    """Read a file, or all YAML and JSON files of a folder.

    :raises ConfigError: it cannot be read, or something in it is wrong.
    """
    found = Manifests({}, {}, {})
    others = 0
    for file in _files(place):
        for number, document in _documents(file):
            taken = _take(document, found, f"{file}, document {number}")
            others += not taken
    return msgspec.structs.replace(found, passed_over=others)


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"--manifests {place} is not there, expected a folder of YAML files, or one file")
    return sorted(one for one in place.iterdir() if one.suffix in SUFFIXES and one.is_file())


def _documents(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
        documents = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{file} is not YAML{where}: {getattr(error, 'problem', None) or error}") from error
    for number, document in enumerate(documents, start=1):
        if document is None:
            continue
        for one in document.get("items", []) if _kind(document)[1] in LISTS else [document]:
            if not isinstance(one, dict):
                raise ConfigError(f"{file}, document {number} is no object, expected apiVersion, kind and metadata")
            yield number, one


def _kind(document: object) -> tuple[str, str]:
    if not isinstance(document, dict):
        return "", ""
    return str(document.get("apiVersion", "")), str(document.get("kind", ""))


def _take(document: dict[str, Any], found: Manifests, where: str) -> bool:
    kind = KINDS.get(_kind(document))
    if kind is None:
        return False
    metadata = document.get("metadata")
    name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
    try:
        made = msgspec.convert(document, kind)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: the {kind.__name__} {name} is wrong: {error}") from error
    path = made.metadata.path
    if isinstance(made, ModelServer):
        known = path in found.servers
        found.servers[path] = made
    elif isinstance(made, ModelRoute):
        known = path in found.routes
        found.routes[path] = made
    else:
        known = path in found.pods
        found.pods[path] = made
    if known:
        raise ConfigError(f"{where}: the {kind.__name__} {path} is there twice, name each once")
    return True
