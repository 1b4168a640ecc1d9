"""What belongs to whom: a tenant's name is a part of its namespaces' names inside of the node.

So whatever knows a namespace by its name (segments on disk, tiers, records of changes) keeps tenants apart without
knowing of them.  What always holds: no client can name a namespace of a tenant, its own not either; the node puts the
tenant in front, and refuses names that begin like that.
"""

from __future__ import annotations

import re

from ems.errors import PoolRefused

MARK = "//"
"""How the name of a tenant's namespace begins."""

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


def is_tenant(name: str) -> bool:
    """Whether a tenant can be called ``name``: 1 to 64 letters, digits and ``. _ @ + -``, the first no sign."""
    return _TENANT.fullmatch(name) is not None


def qualified(tenant: str, name: str) -> str:
    return f"{MARK}{tenant}/{name}"


def tenant_of(name: str) -> str:
    """Whose the namespace ``name`` (inside of the node) is; empty for one of an open node."""
    return name[len(MARK) :].partition("/")[0] if name.startswith(MARK) else ""


def own_name(name: str) -> str:
    """What the tenant calls its namespace ``name`` (inside of the node)."""
    return name[len(MARK) :].partition("/")[2] if name.startswith(MARK) else name


def refuse_marked(name: str) -> None:
    if name.startswith(MARK):
        raise PoolRefused(f"a namespace is called {name[:40]!r}, but names that begin with {MARK!r} are the node's own")
