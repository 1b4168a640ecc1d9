"""Which ``ModelServer`` a request goes to: by its model, the oldest route first, its rules in their order.

What always holds: the same request, routes and generator give the same target; a route that does not take a request
leaves it to the next one; a model's own name counts before an adapter of that name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from ems.kthena.networking import Asked, ModelRoute, Rule
from ems.kthena.rate_limit import RateLimit
from ems.kubernetes.objects import ObjectName

_LAST = datetime.max.replace(tzinfo=UTC)


class Target(NamedTuple):
    """Where a request goes."""

    route: ObjectName
    server: ObjectName
    adapter: bool
    """Whether it was matched by an adapter's name, which is sent on as it is."""
    limits: tuple[tuple[str, RateLimit], ...]
    """Scopes and what holds for them."""


class Routes:
    """All routes, ready to be asked."""

    def __init__(self, routes: Iterable[ModelRoute] = ()) -> None:
        self._of_models: dict[str, list[ModelRoute]] = {}
        self._of_adapters: dict[str, list[ModelRoute]] = {}
        for route in sorted(routes, key=_age):
            if route.spec.parent_refs:  # it is reached through a gateway, which this router is not
                continue
            if route.spec.model_name:
                self._of_models.setdefault(route.spec.model_name, []).append(route)
            for adapter in dict.fromkeys(route.spec.lora_adapters):
                self._of_adapters.setdefault(adapter, []).append(route)

    def names(self) -> list[str]:
        """Models and adapters, each once."""
        return list(dict.fromkeys((*self._of_models, *self._of_adapters)))

    def match(self, model: str, path: str, asked: Asked, draw: random.Random) -> Target | None:
        """Return where a request goes; None when no route takes it."""
        routes = self._of_models.get(model)
        adapter = routes is None
        for route in self._of_adapters.get(model, ()) if routes is None else routes:
            for rule in route.spec.rules:
                if rule.model_match is None or rule.model_match.takes(model, path, asked):
                    server = ObjectName(route.key.namespace, _drawn(rule, draw))
                    limit = route.spec.rate_limit
                    limits = ((f"route/{route.key}", limit),) if limit is not None else ()
                    return Target(route.key, server, adapter, limits)
        return None


def _age(route: ModelRoute) -> tuple[datetime, int, str, ObjectName]:
    version = route.metadata.resource_version
    return route.metadata.creation_timestamp or _LAST, len(version), version, route.key


def _drawn(rule: Rule, draw: random.Random) -> str:
    targets = rule.target_models
    at = draw.randrange(sum(target.weight for target in targets)) if len(targets) > 1 else -1
    for target in targets:
        at -= target.weight
        if at < 0:
            break
    assert target.model_server_name is not None
    return target.model_server_name
