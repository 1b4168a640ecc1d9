"""Brings a catalogue into the fleet, and finds for each request the instances that may serve it.

What always holds: a request that runs keeps what it began with; an instance that is no longer selected by any server
gets no new request and finishes those it has.
"""

from __future__ import annotations

import dataclasses
import logging
import random

import msgspec

from ems.errors import ConfigError
from ems.http.address import Address
from ems.http.message import Refusal, Request, find
from ems.kubernetes.objects import ObjectName, parse_duration
from ems.router.config import RouterConfig
from ems.router.exchange import Parts
from ems.router.fleet import Role
from ems.router.kthena.catalogue import Catalogue, Serving
from ems.router.kthena.objects import EnginePod, handoff_of
from ems.router.request import CompletionRequest

log = logging.getLogger("ems.router")


class Served:
    """What the router serves at the moment."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._draw = random.Random()
        self._of: dict[ObjectName, tuple[Serving, Parts]] = {}
        self._listed: set[tuple[Role, Address]] = set()
        self._said: set[str] = set()
        self.catalogue = Catalogue()

    def apply(self, catalogue: Catalogue, now: float, *, trusted: bool = False) -> None:
        """Let requests from now on go by this catalogue; ``trusted`` instances get some before their first probe.

        :raises ConfigError: the router does not speak to engines as a file wants it; nothing has changed then.  What
            wants it in a cluster, where others write too, is left out alone.
        """
        secured = self._parts.config.tls.engine_tls
        how = "with --engine-tls it speaks https" if secured else "it speaks https with --engine-tls only"
        wrong = {
            key: f"ModelServer {key}: spec.workloadPort.protocol is {wants}, the router does not: {how}"
            for key, serving in catalogue.servings.items()
            if ((wants := serving.spec.workload_port.protocol) == "https") is not secured
        }
        if wrong and self._parts.config.cluster is None:
            raise ConfigError(next(iter(wrong.values())))
        limited = [] if self._parts.config.takes_limits else catalogue.limited()
        whole = [
            f"ModelRoute {key}: each of several --workers takes its rateLimit: add --limits-redis" for key in limited
        ]
        if whole and self._parts.config.cluster is None:
            raise ConfigError(whole[0])
        servings = {key: serving for key, serving in catalogue.servings.items() if key not in wrong}
        fleet = self._parts.fleet
        wanted: dict[tuple[Role, Address], tuple[dict[str, str], EnginePod]] = {}
        for key, serving in servings.items():
            for member in serving.members:
                groups, _ = wanted.setdefault((member.role, member.address), ({}, member.pod))
                groups[str(key)] = member.group
        for role, address in self._listed - wanted.keys():
            fleet.remove(role, address)
        for (role, address), (groups, pod) in wanted.items():
            fleet.add(role, address, now, trusted=trusted)
            fleet.belongs(role, address, groups, pod.bootstrap_port, pod.metadata.name)
        self._listed = set(wanted)
        self._parts.prober.wake()
        self._of = {key: (serving, self._parts_of(key, serving)) for key, serving in servings.items()}
        self.catalogue = catalogue
        notes = {*catalogue.notes(), *wrong.values(), *whole}
        if self._parts.config.admission.limits_redis is None:
            notes.update(
                f"ModelRoute {key} shares its rateLimit by Redis, which takes --limits-redis: it is not shared"
                for key in catalogue.shared_limits()
            )
        for note in sorted(notes - self._said):
            log.warning("%s", note)
        self._said = notes

    def _parts_of(self, key: ObjectName, serving: Serving) -> Parts:
        policy, config = serving.spec.traffic_policy, self._parts.config
        changed: dict[str, object] = {"request_timeout": policy.seconds}
        if policy.retry is not None:
            changed |= {
                "max_retries": policy.retry.attempts,
                "retry_delay": parse_duration(policy.retry.retry_interval),
            }
        own: RouterConfig = msgspec.structs.replace(config, **changed)
        paired = serving.spec.workload_selector.pd_group is not None
        handoff = handoff_of(serving.spec) if paired else self._parts.handoff
        return dataclasses.replace(self._parts, config=own, server=str(key), handoff=handoff)

    def route(self, request: CompletionRequest, client: Request) -> tuple[Parts, CompletionRequest]:
        """Return what serves a request, and the request as instances get it.

        :raises Refusal: nobody serves it.
        """

        def asked(name: str) -> str:
            return (find(client.headers, name.encode()) or b"").decode("latin-1")

        model = request.model
        if not model.strip():
            raise Refusal(404, "model not found: the request names no model", code="model_not_found", param="model")
        target = self.catalogue.routes.match(model, client.path, asked, self._draw)
        if target is None:
            raise Refusal(404, "route not found", code="route_not_found", param="model")
        self._parts.observer.series.models.add(model)
        found = self._of.get(target.server)
        if found is None:
            raise Refusal(404, f"can't find model server {target.server}", code="model_server_not_found", param="model")
        serving, parts = found
        if not serving.members:
            later = {"retry-after": "1"}
            raise Refusal(503, "no available pods; try again later", code="no_decode_server", headers=later)
        name = serving.spec.model
        if name and name != model and not target.adapter:
            request = request.renamed(name)
        return dataclasses.replace(parts, route=str(target.route), limited=target.limits), request

    def models(self) -> list[dict[str, object]]:
        names = self.catalogue.routes.names()
        return [{"id": name, "object": "model", "created": 0, "owned_by": "kthena"} for name in names]
