"""What namespaces mean, as far as their engines described them: so that a miss can name what differs.

A brain.  A description is a map of plain words, such as ``block_size: 16``; the namespace's name has their hash only.
Namespaces are related when they are the same plane of the same model of the same tenant.  What always holds: memory is
bounded; a description changes nothing about which pages meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from ems.errors import PoolRefused
from ems.pool.names import MAX_NAME, MODEL, PLANE, TENANT, Difference, check_facts, tenant_of

MAX_DESCRIBED = 1024
"""Namespaces whose descriptions are kept; the oldest of the tenant that has most leaves first."""
MAX_RELATED = 64
"""Other layouts of one model that are looked at, the newest first."""


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
