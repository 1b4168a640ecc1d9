"""What namespaces are called inside of the node, and the facts by which engines describe what they mean.

The tenant is a part of its namespaces' names.  So whatever knows a namespace by its name (segments on disk, tiers,
records of changes) keeps tenants apart without knowing of them.  What always holds: no client can name a namespace of a
tenant, its own not either; the node puts the tenant in front, and refuses names that begin like that.

Facts are plain words such as ``block_size: 16``, while the namespace's name has their hash only: so a miss can name
what differs.  Namespaces are related when they are the same plane of the same model of the same tenant.  What always
holds: memory is bounded; a description changes nothing about which pages meet.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from ems.errors import PoolRefused

MAX_NAME = 512
"""Characters of the longest name of a namespace."""
MAX_FACTS = 48
MAX_CHARACTERS = 8192
"""Characters of one description."""
MAX_TEXT = 160
"""Characters of a fact that are worth showing; longer ones are told apart by their digest."""
MAX_DESCRIBED = 1024
"""Namespaces whose descriptions are kept; the oldest of the tenant that has most leaves first."""
MAX_RELATED = 64
"""Other layouts of one model that are looked at, the newest first."""

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


class Layouts:
    """Descriptions by the namespaces' names."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, str]] = {}
        """The oldest description first."""

    def describe(self, namespace: str, facts: Mapping[str, str]) -> None:
        """``namespace`` means ``facts``.  Raises PoolRefused: see :func:`check_facts`, or the name is too long."""
        check_facts(facts)
        if len(namespace) > MAX_NAME:
            raise PoolRefused(f"a namespace's name has {len(namespace)} characters, expected at most {MAX_NAME}")
        self.all.pop(namespace, None)
        if len(self.all) >= MAX_DESCRIBED:
            tenants = [tenant_of(name) for name in self.all]
            del self.all[list(self.all)[tenants.index(Counter(tenants).most_common(1)[0][0])]]
        self.all[namespace] = dict(facts)

    def facts(self, namespace: str) -> Mapping[str, str]:
        return self.all.get(namespace, {})

    def related(self, namespace: str) -> Iterator[str]:
        """Other layouts of the model that ``namespace`` has."""
        if namespace in self.all:
            family = _family(self.all[namespace])
            alike = (name for name, facts in reversed(self.all.items()) if _family(facts) == family)
            yield from islice((name for name in alike if name != namespace), MAX_RELATED)

    def differences(self, namespace: str, other: str) -> Difference:
        mine, theirs = self.facts(namespace), self.facts(other)
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return Difference(other, {name: (mine.get(name, ""), theirs.get(name, "")) for name in names})


def _family(facts: Mapping[str, str]) -> tuple[str, str, str]:
    return facts[TENANT], facts[MODEL], facts.get(PLANE, "")
