"""What all Kubernetes objects have, and pods."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ems.errors import ConfigError

_UNITS: Final = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(ns|us|µs|ms|s|m|h)")
_NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"

Name = Annotated[str, Meta(pattern=_NAME)]
Labels = dict[str, str]


class ObjectName(NamedTuple):
    """Namespace and name: what tells objects of one kind apart."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_duration(text: str) -> float:
    """Seconds of a duration as Go writes it, such as ``10s``, ``1m30s`` and ``100ms``.

    :raises ValueError: anything else.
    """
    parts = _PART.findall(text)
    if text != "0" and (not parts or "".join(number + unit for number, unit in parts) != text):
        raise ValueError(f"{text[:40]!r} is no duration: expected one such as 10s, 1m30s or 100ms")
    return float(sum(Fraction(number) * _UNITS[unit] for number, unit in parts) / 10**9)


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is read of an object's ``metadata``; there may be more."""

    name: Name
    namespace: Name = "default"
    labels: Labels = {}
    annotations: Labels = {}
    creation_timestamp: Annotated[datetime, Meta(tz=True)] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""


class Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What each object has."""

    api_version: str
    kind: str
    metadata: Metadata

    @property
    def key(self) -> ObjectName:
        return ObjectName(self.metadata.namespace, self.metadata.name)


class Condition(msgspec.Struct, frozen=True):
    """One of a pod's conditions."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What of a pod's state counts."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[Condition, ...] = ()


class Pod(Object, frozen=True, kw_only=True):
    """What of a pod is read; others write it."""

    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        """Whether it may get requests; one without any conditions, as people write them into files, may."""
        if self.metadata.deletion_timestamp is not None or not self.status.pod_ip:
            return False
        conditions = self.status.conditions
        return not conditions or any(one.type == "Ready" and one.status == "True" for one in conditions)


def _placed(message: str) -> str:
    """The field first, then what is wrong with it."""
    text, at, path = message.rpartition(" - at `$")
    text = text.replace("Object contains", "there is an").replace("Object missing", "there is no")
    return f"{path.rstrip('`').lstrip('.') or 'the object'}: {text}" if at else message


class Resource(NamedTuple):
    """A kind of objects that counts: its name on an API server, what its objects say that they are, their type."""

    plural: str
    api_version: str
    kind: str
    type: type[Object]


def decode(document: object, resources: Iterable[Resource], *, source: str) -> Object | None:
    """Return what a document is; None when it is of none of these kinds.

    :raises ConfigError: it is no object, or not as it must be.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a document is no object: expected apiVersion, kind, metadata and spec")
    version, kind = document.get("apiVersion"), document.get("kind")
    if not kind or not version:
        raise ConfigError(f"{source}: a document has no kind or no apiVersion")
    wanted = next((one for one in resources if one.kind == kind), None)
    if wanted is None:
        return None
    if wanted.api_version != version:
        raise ConfigError(f"{source}: {kind} has apiVersion {version!r}, expected {wanted.api_version}")
    try:
        return msgspec.convert(document, wanted.type)
    except (msgspec.ValidationError, RecursionError) as error:
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        what = f"{kind} {name}" if isinstance(name, str) else f"a {kind} without a name"
        raise ConfigError(f"{source}: {what}: {_placed(str(error))}") from None
