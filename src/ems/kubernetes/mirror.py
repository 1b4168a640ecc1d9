"""The objects of an API server as lists and watches tell them.

What always holds: an object that is wrong counts as it was when it was right, or not at all, and others are not touched
by it; after a list nothing is left of what was there before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ems.errors import ConfigError, EmsError
from ems.kubernetes.objects import Object, ObjectName, Resource, decode

_VERSION = re.compile(r"[0-9A-Za-z._-]{1,64}")


class WatchExpired(EmsError):
    """The server does not know any more what changed since: list anew."""

    transient = True


class Mirror:
    """Each resource is listed first, and then changes by events; ``problems`` says what is wrong with an object."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self.resources = resources
        self._objects: dict[Resource, dict[ObjectName, Object]] = {}
        self._problems: dict[tuple[Resource, ObjectName], str] = {}

    @property
    def complete(self) -> bool:
        return len(self._objects) == len(self.resources)

    @property
    def problems(self) -> frozenset[str]:
        return frozenset(self._problems.values())

    def objects(self) -> Iterator[Object]:
        for found in self._objects.values():
            yield from found.values()

    def listed(self, resource: Resource, items: Iterable[object]) -> None:
        before = self._objects.get(resource, {})
        self._objects[resource] = {}
        self._problems = {key: text for key, text in self._problems.items() if key[0] != resource}
        for item in items:
            self._put(resource, item, before)

    def event(self, resource: Resource, event: object) -> str | None:
        """Take in an event; return the resource version that it is of.

        :raises WatchExpired: what comes next cannot follow on what is known.
        """
        kind, item = (event.get("type"), event.get("object")) if isinstance(event, dict) else (None, None)
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(item, dict):
            raise WatchExpired(f"The watch of {resource.plural} ended with {kind!r}")
        if kind == "DELETED":
            key = _key(item)
            self._objects[resource].pop(key, None)
            self._problems.pop((resource, key), None)
        elif kind != "BOOKMARK":
            self._put(resource, item, self._objects[resource])
        return version_of(item)

    def _put(self, resource: Resource, item: object, before: dict[ObjectName, Object]) -> None:
        key = _key(item)
        self._problems.pop((resource, key), None)
        try:
            # Items of a list do not repeat what they are.
            whole = {"apiVersion": resource.api_version, "kind": resource.kind}
            one = decode(whole | (item if isinstance(item, dict) else {}), [resource], source="API server")
        except ConfigError as error:
            self._problems[resource, key] = str(error)
            one = before.get(key)
        if one is not None:
            self._objects[resource][key] = one


def version_of(item: dict[object, object]) -> str | None:
    metadata = item.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) and _VERSION.fullmatch(version) else None


def _key(item: object) -> ObjectName:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(metadata, dict):
        metadata = {}
    return ObjectName(str(metadata.get("namespace", "default")), str(metadata.get("name", "")))
