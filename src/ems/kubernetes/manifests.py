"""Objects out of YAML: several documents a file, and lists as ``kubectl get -o yaml`` prints them.

Texts that look like dates stay texts, and a field without a value is not there, as Kubernetes reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import yaml

from ems.errors import ConfigError
from ems.kubernetes.objects import Object, Resource, decode

_LARGEST: Final = 16 << 20
"""Characters of a document with its aliases written out."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # libyaml's where it is there
    """Safe, without dates and aliases that make much of little; what has no value is not there, as in Kubernetes."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        return {name: value for name, value in found.items() if value is not None}

    def construct_document(self, node: Any) -> Any:
        if _size(node, {}) > _LARGEST:
            raise yaml.YAMLError("its aliases repeat too much: write out what they stand for")
        return super().construct_document(node)


def _size(node: Any, known: dict[int, int]) -> int:
    """Characters of a node's values with each alias written out; too many where it stands within itself."""
    if id(node) not in known:
        known[id(node)] = _LARGEST + 1
        below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        size = max(1, len(below)) if isinstance(below, str) else 1 + sum(_size(one, known) for one in below)
        known[id(node)] = size
    return known[id(node)]


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}


class Manifests(NamedTuple):
    """What stood in some files."""

    objects: tuple[Object, ...]
    ignored: tuple[str, ...]
    """One line for each file with other kinds."""
    sources: Mapping[str, str] = {}
    """The file of each object, by kind and name."""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Say of a mistake, whose sentence begins with an object's kind and name, in which file it stands.

        :raises ConfigError: such a mistake.
        """
        try:
            yield
        except ConfigError as error:
            source = self.sources.get(str(error).partition(":")[0])
            raise ConfigError(f"{source}: {error}" if source else str(error)) from None


def load_yaml(text: str, *, source: str) -> list[object]:
    """The documents of a text that are not empty.

    :raises ConfigError: it is no YAML.
    """
    try:
        return [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise ConfigError(f"{source} is no YAML: {' '.join(str(error).split())}") from None


def read(texts: dict[str, str], resources: Sequence[Resource]) -> Manifests:
    """Read files by their names.

    :raises ConfigError: one of them is wrong, or an object is there twice.
    """
    objects: list[Object] = []
    ignored = []
    found: dict[str, str] = {}
    for source, text in texts.items():
        others: Counter[str] = Counter()
        for document in _flat(load_yaml(text, source=source)):
            one = decode(document, resources, source=source)
            if one is None:
                assert isinstance(document, dict)
                others[str(document["kind"])] += 1
                continue
            name = f"{one.kind} {one.key}"
            if name in found:
                raise ConfigError(f"{source}: {name} is there twice: it also stands in {found[name]}")
            found[name] = source
            objects.append(one)
        if others:
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
            ignored.append(f"{source}: {counted}")
    return Manifests(tuple(objects), tuple(ignored), found)


def _flat(documents: list[object]) -> Iterator[object]:
    for document in documents:
        if isinstance(document, dict) and str(document.get("kind")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else ()
        else:
            yield document
