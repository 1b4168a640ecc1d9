"""What namespaces are called inside of the node, and the facts by which engines describe what they mean.

The tenant is a part of its namespaces' names.  So whatever knows a namespace by its name (segments on disk, tiers,
records of changes) keeps tenants apart without knowing of them.  What always holds: no client can name a namespace of a
tenant, its own not either; the node puts the tenant in front, and refuses names that begin like that.

Facts are plain words such as ``block_size: 16``; what is known of namespaces is kept in
:mod:`ems.pool.reasons.layouts`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec

from ems.errors import PoolRefused

MAX_NAME = 512
"""Characters of the longest name of a namespace."""
MAX_FACTS = 48
MAX_CHARACTERS = 8192
"""Characters of one description."""
MAX_TEXT = 160
"""Characters of a fact that are worth showing; longer ones are told apart by their digest."""

TENANT, MODEL, PLANE = "tenant", "model", "plane"
"""The facts by which namespaces are related; a description has at least the first two."""
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


class Difference(msgspec.Struct, frozen=True):
    """A related namespace, and what it has otherwise: field, the value here, the value there."""

    namespace: str
    fields: dict[str, tuple[str, str]]


def plain_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """``facts`` of any plain values as they are described: as text, long ones by their digest."""
    texts = {name: str(value) for name, value in facts.items()}
    return {
        name: text if len(text) <= MAX_TEXT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for name, text in texts.items()
    }


def check_facts(facts: Mapping[str, str]) -> None:
    """Look whether ``facts`` can describe a namespace.

    Raises PoolRefused: they are too many, too long, or name no tenant and model.
    """
    characters = sum(len(name) + len(text) for name, text in facts.items())
    if len(facts) > MAX_FACTS or characters > MAX_CHARACTERS:
        raise PoolRefused(
            f"a namespace is described by {len(facts)} facts of {characters} characters, expected at most {MAX_FACTS} "
            f"of {MAX_CHARACTERS}"
        )
    if TENANT not in facts or MODEL not in facts:
        raise PoolRefused(f"a namespace is described without its {TENANT} and {MODEL}, give both")
