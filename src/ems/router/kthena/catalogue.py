"""All objects at one moment, and what they mean: routes, and which instances serve what in which role.

What always holds: a pod that two servers select is one instance; a pod that is not ready is none; with ``pdGroup`` a
pod that has the labels of both roles decodes, and one that has neither, or no group, serves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ems.errors import ConfigError
from ems.http.address import Address
from ems.kthena.networking import ModelRoute, ModelServer, ModelServerSpec
from ems.kthena.routes import Routes
from ems.kubernetes.objects import Labels, Object, ObjectName
from ems.router.fleet import Role
from ems.router.kthena.objects import EnginePod


class Member(NamedTuple):
    """An instance of a server; ``group`` says who may hand over to whom, and is empty where there are no groups."""

    role: Role
    address: Address
    group: str
    pod: EnginePod


class Serving(NamedTuple):
    """A ``ModelServer`` and its instances, in the order of their pods' names."""

    spec: ModelServerSpec
    members: tuple[Member, ...]


class Catalogue:
    """Never changes; another state of the objects is another catalogue.

    :raises ConfigError: a route that was in ``before`` has another model now, which Kthena does not allow.
    """

    def __init__(self, objects: Iterable[Object] = (), before: Catalogue | None = None) -> None:
        objects = tuple(objects)
        self.model_routes = {one.key: one for one in objects if isinstance(one, ModelRoute)}
        for key, route in self.model_routes.items():
            old = before.model_routes.get(key) if before is not None else None
            if old is not None and old.spec.model_name != route.spec.model_name:
                raise ConfigError(
                    f"ModelRoute {key}: spec.modelName is {route.spec.model_name!r} and was {old.spec.model_name!r}: "
                    "it cannot change, give the route another name"
                )
        self.routes = Routes(self.model_routes.values())
        pods: dict[str, list[EnginePod]] = {}
        ready = (one for one in objects if isinstance(one, EnginePod) and one.ready)
        for pod in sorted(ready, key=lambda pod: pod.key):
            pods.setdefault(pod.metadata.namespace, []).append(pod)
        self.servings: Mapping[ObjectName, Serving] = {
            one.key: Serving(one.spec, _members(one.spec, pods.get(one.metadata.namespace, [])))
            for one in objects
            if isinstance(one, ModelServer)
        }

    def shared_limits(self) -> list[ObjectName]:
        """Routes whose limits are to count for several routers together."""
        limits = ((key, route.spec.rate_limit) for key, route in self.model_routes.items())
        return [key for key, limit in limits if limit is not None and limit.global_ is not None]

    def limited(self) -> list[ObjectName]:
        return [key for key, route in self.model_routes.items() if route.spec.rate_limit is not None]

    def notes(self) -> list[str]:
        """Sentences on what is probably not meant."""
        said = [
            f"ModelRoute {key} has parentRefs and is left out: this router is no gateway"
            for key, route in self.model_routes.items()
            if route.spec.parent_refs
        ]
        for key, route in self.model_routes.items():
            names = {target.model_server_name for rule in route.spec.rules for target in rule.target_models}
            wanted = {ObjectName(key.namespace, str(name)) for name in names}
            missing = sorted(wanted - self.servings.keys())
            said.extend(f"ModelRoute {key} names the ModelServer {name}, which is not there" for name in missing)
        for key, serving in self.servings.items():
            roles = {member.role for member in serving.members}
            if Role.DECODE not in roles:
                pod = "pod that decodes" if roles else "pod"
                said.append(f"ModelServer {key} selects no {pod}: requests for it are refused until one is ready")
        return said


def _members(spec: ModelServerSpec, pods: list[EnginePod]) -> tuple[Member, ...]:
    selector = spec.workload_selector
    found: dict[tuple[Role, Address], Member] = {}
    for pod in pods:
        labels = pod.metadata.labels
        if not _has(labels, selector.match_labels):
            continue
        role, group = Role.DECODE, ""
        if (pairs := selector.pd_group) is not None:
            group = labels.get(pairs.group_key, "")
            if not group:
                continue
            if not _has(labels, pairs.decode_labels):
                if not _has(labels, pairs.prefill_labels):
                    continue
                role = Role.PREFILL
        address = Address.of(pod.status.pod_ip, pod.port or spec.workload_port.port)
        found.setdefault((role, address), Member(role, address, group, pod))
    return tuple(found.values())


def _has(labels: Labels, wanted: Labels) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())
