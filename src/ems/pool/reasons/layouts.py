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
        self._related: dict[tuple[str, str, str], dict[str, None]] = {}

    def describe(self, namespace: str, facts: Mapping[str, str]) -> None:
        """``namespace`` means ``facts``.  Raises PoolRefused: see :func:`check_facts`, or the name is too long."""
        check_facts(facts)
        if len(namespace) > MAX_NAME:
            raise PoolRefused(f"a namespace's name has {len(namespace)} characters, expected at most {MAX_NAME}")
        self._forget(namespace)
        if len(self.all) >= MAX_DESCRIBED:
            tenants = [tenant_of(name) for name in self.all]
            self._forget(list(self.all)[tenants.index(Counter(tenants).most_common(1)[0][0])])
        self.all[namespace] = dict(facts)
        self._related.setdefault(_family(facts), {})[namespace] = None

    def _forget(self, namespace: str) -> None:
        facts = self.all.pop(namespace, None)
        if facts is not None:
            family = self._related[_family(facts)]
            del family[namespace]
            if not family:
                del self._related[_family(facts)]

    def facts(self, namespace: str) -> Mapping[str, str]:
        return self.all.get(namespace, {})

    def related(self, namespace: str) -> Iterator[str]:
        """Other layouts of the model that ``namespace`` has."""
        facts = self.all.get(namespace)
        if facts is not None:
            others = (name for name in reversed(self._related[_family(facts)]) if name != namespace)
            yield from islice(others, MAX_RELATED)

    def differences(self, namespace: str, other: str) -> Difference:
        mine, theirs = self.facts(namespace), self.facts(other)
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return Difference(other, {name: (mine.get(name, ""), theirs.get(name, "")) for name in names})


def _family(facts: Mapping[str, str]) -> tuple[str, str, str]:
    return facts[TENANT], facts[MODEL], facts.get(PLANE, "")
