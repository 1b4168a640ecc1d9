"""Which ``ModelServer`` a request goes to: by its model, the oldest route first, its rules in their order.

What always holds: the same request, routes and generator give the same target; a route that does not take a request
leaves it to the next one; a model's own name counts before an adapter of that name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from ems.router.admission.limits import RateLimit
from ems.router.kthena.objects import ModelMatch, ModelRoute, ObjectName, Rule, StringMatch, pattern_of

_LAST = datetime.max.replace(tzinfo=UTC)

Asked = Callable[[str], str]
"""Gives a header by its name in lower case; one that is not there is empty."""


class Target(NamedTuple):
    """Where a request goes."""

    route: ObjectName
    server: ObjectName
    adapter: bool
    """Whether it was matched by an adapter's name, which is sent on as it is."""
    limits: tuple[tuple[str, RateLimit], ...]
    """Scopes and what holds for them."""


class _Route(NamedTuple):
    key: ObjectName
    rules: tuple[tuple[Callable[[str, str, Asked], bool], Rule], ...]
    limits: tuple[tuple[str, RateLimit], ...]


class Routes:
    """All routes, ready to be asked."""

    def __init__(self, routes: Iterable[ModelRoute] = ()) -> None:
        self._of_models: dict[str, list[_Route]] = {}
        self._of_adapters: dict[str, list[_Route]] = {}
        for route in sorted(routes, key=_age):
            if route.spec.parent_refs:  # it is reached through a gateway, which this router is not
                continue
            compiled = _compiled(route)
            if route.spec.model_name:
                self._of_models.setdefault(route.spec.model_name, []).append(compiled)
            for adapter in dict.fromkeys(route.spec.lora_adapters):
                self._of_adapters.setdefault(adapter, []).append(compiled)

    def names(self) -> list[str]:
        """Models and adapters, each once."""
        return list(dict.fromkeys((*self._of_models, *self._of_adapters)))

    def match(self, model: str, path: str, asked: Asked, draw: random.Random) -> Target | None:
        """Return where a request goes; None when no route takes it."""
        candidates = self._of_models.get(model)
        adapter = candidates is None
        if candidates is None:
            candidates = self._of_adapters.get(model, [])

        for route in candidates:
            for takes, rule in route.rules:
                if takes(model, path, asked):
                    server = ObjectName(route.key.namespace, _drawn(rule, draw))
                    return Target(route.key, server, adapter, route.limits)
        return None


def _age(route: ModelRoute) -> tuple[datetime, int, str, ObjectName]:
    version = route.metadata.resource_version
    return route.metadata.creation_timestamp or _LAST, len(version), version, route.key


def _compiled(route: ModelRoute) -> _Route:
    limit = route.spec.rate_limit.limit if route.spec.rate_limit is not None else None
    limits = ((f"route/{route.key}", limit),) if limit is not None else ()
    return _Route(route.key, tuple((_taking(rule.model_match), rule) for rule in route.spec.rules), limits)


def _drawn(rule: Rule, draw: random.Random) -> str:
    targets = rule.target_models
    at = draw.randrange(sum(target.weight for target in targets)) if len(targets) > 1 else -1
    for target in targets:
        at -= target.weight
        if at < 0:
            break
    assert target.model_server_name is not None
    return target.model_server_name


def _taking(match: ModelMatch | None) -> Callable[[str, str, Asked], bool]:
    if match is None:
        return lambda _model, _path, _asked: True
    wanted = match.body.model if match.body is not None else None
    uri = _matching(match.uri) if match.uri is not None else None
    headers = [(name.lower(), _matching(one)) for name, one in match.headers.items()]

    def takes(model: str, path: str, asked: Asked) -> bool:
        if wanted and wanted != model:
            return False
        if not all(matches(asked(name)) for name, matches in headers):
            return False
        return uri is None or uri(path)

    return takes


def _matching(match: StringMatch) -> Callable[[str], bool]:
    exact, prefix = match.exact, match.prefix
    if exact is not None:
        return lambda text: text == exact
    if prefix is not None:
        return lambda text: text.startswith(prefix)
    assert match.regex is not None
    pattern = pattern_of(match.regex)
    return lambda text: pattern.search(text) is not None
