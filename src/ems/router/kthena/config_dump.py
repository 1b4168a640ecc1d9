"""What is served, as the pages below ``/debug/config_dump`` of Kthena's router show it: routes, servers and pods.

What always holds: values of headers that carry credentials, and what stands before the host of a Redis, are not shown.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ems.kthena.networking import ModelRouteSpec
from ems.router.admission.gate import CREDENTIALS
from ems.router.fleet import Fleet, Instance, Role
from ems.router.kthena.catalogue import Catalogue, Member, Serving

PREFIX: Final = "/debug/config_dump/"

_METRICS: Final = ("gpuCacheUsage", "requestWaitingNum", "requestRunningNum", "tpot", "ttft")


def config_dump(catalogue: Catalogue, fleet: Fleet, path: str, now: float) -> object | None:
    """Return what is there under a path behind :data:`PREFIX`: all of a kind, or one object; None is nothing."""
    instances = {(role, one.address): one for role in Role for one in fleet.listed(role)}
    kinds = {
        "modelroutes": {key: {"spec": _shown(route.spec)} for key, route in catalogue.model_routes.items()},
        "modelservers": {key: _server(serving) for key, serving in catalogue.servings.items()},
        "pods": {
            member.pod.key: _pod(serving, member, instance, now)
            for serving in catalogue.servings.values()
            for member in serving.members
            if (instance := instances.get((member.role, member.address))) is not None
        },
    }
    rows = {
        f"namespaces/{key.namespace}/{kind}/{key.name}": {"name": key.name, "namespace": key.namespace, **fields}
        for kind, of_kind in kinds.items()
        for key, fields in of_kind.items()
    }
    if path in kinds:
        return {path: [row for place, row in rows.items() if place.split("/")[2] == path]}
    return rows.get(path)


def _shown(spec: ModelRouteSpec) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(spec)
    for rule in shown["rules"]:
        headers = (rule["modelMatch"] or {}).get("headers", {})
        headers.update({name: "hidden" for name in headers if name.lower().encode() in CREDENTIALS})
    if (shared := (shown["rateLimit"] or {}).get("global")) is not None:
        shared["redis"]["address"] = shared["redis"]["address"].rpartition("@")[2]
    return shown


def _server(serving: Serving) -> dict[str, Any]:
    prefills, decodes = ([str(one.pod.key) for one in serving.members if one.role is role] for role in Role)
    return {"spec": serving.spec, "associatedPods": prefills + decodes, "decodePods": decodes, "prefillPods": prefills}


def _pod(serving: Serving, member: Member, instance: Instance, now: float) -> dict[str, Any]:
    said = instance.figures.measured(instance.running, 0.0, now)
    figures = (said.kv_usage, said.waiting, said.running, said.tpot, said.ttft)
    return {
        "podInfo": {"podIP": member.pod.status.pod_ip, "labels": member.pod.metadata.labels},
        "engine": serving.spec.inference_engine,
        "metrics": dict(zip(_METRICS, figures, strict=True)),
        "models": sorted(said.models),
        "modelServers": sorted(instance.groups),
    }
