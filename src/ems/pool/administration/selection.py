"""Which namespaces and pages an administrator means by a tenant, a model, a name or an age.

What a namespace's tenant and model are called is read from its name alone, so that it is the same on a node that has
just been started again, which no engine has described anything to yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from ems.pool import names
from ems.pool.protocol.acts import Clear, Refill

_PLANE = re.compile(r"\d+\.\d+")
_SHOWN = 8
"""Names that one refusal shows."""


def tenant_of(name: str) -> str:
    """The tenant of the namespace ``name``; on a node with tenants it is who the node knows to have made it."""
    return names.tenant_of(name) or name.split("/", 1)[0].replace("%2F", "/").replace("%25", "%")


def model_of(name: str) -> str:
    """The model likewise, empty where there is none: names are ``tenant/model/fingerprint``, perhaps with a plane."""
    parts = names.own_name(name).split("/")
    if len(parts) > 3 and _PLANE.fullmatch(parts[-1]):
        parts.pop()
    return "/".join(parts[1:-1] or parts[1:])


def means(act: Clear | Refill, name: str) -> bool:
    return (
        (act.namespace is None or act.namespace == name)
        and (act.tenant is None or act.tenant == tenant_of(name))
        and (act.model is None or act.model == model_of(name))
    )


def nothing_matches(act: Clear | Refill, known: Sequence[str]) -> str:
    """Why ``act`` means none of the namespaces ``known``, in a sentence."""
    criteria = (
        ("tenant", act.tenant, [tenant_of(name) for name in known]),
        ("model", act.model, [model_of(name) for name in known]),
        ("namespace", act.namespace, list(known)),
    )
    for kind, wanted, there in criteria:
        if wanted is not None and wanted not in there:
            return f"there is no {kind} {wanted[:80]!r}{_suggestion(wanted, there)}"
    criteria_text = " and ".join(f"{kind} {wanted!r}" for kind, wanted, _ in criteria if wanted is not None)
    return f"no namespace is of {criteria_text} at once, `ems list` shows what there is"


def unknown_namespace(wanted: str, known: Sequence[str]) -> str:
    """That ``wanted`` is none of the namespaces ``known``, in a sentence."""
    return f"there is no namespace {wanted[:80]!r}{_suggestion(wanted, known)}"


def _suggestion(wanted: str, there: Sequence[str]) -> str:
    known = sorted(set(filter(None, there)))
    close = get_close_matches(wanted, known, 3)
    if close:
        return f", did you mean {' or '.join(close)}?"
    if not known:
        return ", the pool is empty"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f", there are {', '.join(known[:_SHOWN])}{more}"
