"""Which model server a request is for, by Kthena's rules.  A brain; what is drawn comes from a generator given to it.

The routes of a model are tried oldest first; of a route the first rule that matches counts; of its targets one is drawn
by weight.  A route whose rules do not match, or whose target is not there, leaves the request to the next one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from ems.router.kthena.objects import ModelMatch, ModelRoute, ModelServer

_ALWAYS: Final = datetime.min.replace(tzinfo=UTC)


class Target(NamedTuple):
    """Where a request goes: the server's ``namespace/name``, and the model that it is told."""

    server: str
    model: str
    route: ModelRoute


class Routes:
    """All routes of one state of the configuration."""

    def __init__(
        self, routes: Mapping[str, ModelRoute], servers: Mapping[str, ModelServer], draw: random.Random
    ) -> None:
        self._servers = servers
        self._draw = draw
        self._by_model: dict[str, list[ModelRoute]] = defaultdict(list)
        self._by_adapter: dict[str, list[ModelRoute]] = defaultdict(list)
        for route in sorted(routes.values(), key=_age):
            if route.spec.parent_refs:
                continue  # for a Gateway, which this router is none of
            if route.spec.model_name:
                self._by_model[route.spec.model_name].append(route)
            for adapter in route.spec.lora_adapters:
                self._by_adapter[adapter].append(route)

    @property
    def models(self) -> list[str]:
        """Names that requests may give, adapters included."""
        return sorted({*self._by_model, *self._by_adapter})

    def match(self, model: str, path: str, headers: Mapping[str, str]) -> Target | None:
        """Return where a request goes; ``headers`` have names in lower case."""
        adapter = model not in self._by_model
        for route in self._by_adapter.get(model, ()) if adapter else self._by_model[model]:
            for rule in route.spec.rules:
                if not _matches(rule.model_match, model, path, headers):
                    continue
                targets = rule.target_models
                [target] = self._draw.choices(targets, [one.weight for one in targets])
                server = f"{route.metadata.namespace}/{target.model_server_name}"
                if server not in self._servers:
                    break  # the next route of the model may have one
                told = self._servers[server].spec.model
                return Target(server, model if adapter or not told else told, route)
        return None


def _age(route: ModelRoute) -> tuple[datetime, str]:
    made = route.metadata.creation_timestamp or _ALWAYS
    return made if made.tzinfo else made.replace(tzinfo=UTC), route.metadata.path


def _matches(match: ModelMatch | None, model: str, path: str, headers: Mapping[str, str]) -> bool:
    if match is None:
        return True
    if match.body is not None and match.body.model is not None and match.body.model != model:
        return False
    if match.uri is not None and not match.uri.matches(path):
        return False
    return all(wanted.matches(headers.get(name.lower(), "")) for name, wanted in match.headers.items())
