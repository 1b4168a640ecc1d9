"""Which namespaces and pages an administrator means by a tenant, a model, a name or an age."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ems.pool.administration.acts import Clear, Refill
from ems.pool.reasons.layouts import MODEL, TENANT
from ems.pool.tenants import names

_PLANE = re.compile(r"\d+\.\d+")


def tenant_of(name: str, facts: Mapping[str, str]) -> str:
    """The tenant of the namespace ``name``, which its engine described by ``facts`` or not at all.

    On a node with tenants it is who the node knows to have made it, whatever was described.
    """
    return names.tenant_of(name) or facts.get(TENANT) or name.split("/", 1)[0].replace("%2F", "/").replace("%25", "%")


def model_of(name: str, facts: Mapping[str, str]) -> str:
    """The model likewise, empty where there is none: names are ``tenant/model/fingerprint``, perhaps with a plane."""
    if MODEL in facts:
        return facts[MODEL]
    parts = names.own_name(name).split("/")
    if len(parts) > 3 and _PLANE.fullmatch(parts[-1]):
        parts.pop()
    return "/".join(parts[1:-1])


def means(act: Clear | Refill, name: str, facts: Mapping[str, str]) -> bool:
    """Whether the namespace ``name`` is among those that ``act`` is about."""
    return (
        (act.namespace is None or act.namespace == name)
        and (act.tenant is None or act.tenant == tenant_of(name, facts))
        and (act.model is None or act.model == model_of(name, facts))
    )
