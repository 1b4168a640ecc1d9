"""What namespaces mean, as far as their engines described them: so that a miss can name what differs.

A brain.  A description is a map of plain words, such as ``block_size: 16``; the namespace's name has their hash only.
Namespaces are related when they are the same plane of the same model of the same tenant.  What always holds: memory is
bounded; a description changes nothing about which pages meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TypeVar

from ems.errors import PoolRefused
from ems.pool.facts import MAX_NAME, MODEL, PLANE, TENANT, Difference, check_facts
from ems.pool.names import tenant_of

MAX_DESCRIBED = 1024
"""Namespaces whose descriptions are kept; the oldest of the tenant that has most leaves first."""
MAX_RELATED = 64
"""Other layouts of one model that are looked at, the newest first."""
_Group = TypeVar("_Group")


class Layouts:
    """Descriptions by the namespaces' names."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, str]] = {}
        self._related: dict[tuple[str, str, str], dict[str, None]] = {}
        self._of: dict[str, dict[str, None]] = {}
        """The names of each tenant's namespaces, the oldest description first."""

    def describe(self, namespace: str, facts: Mapping[str, str]) -> None:
        """``namespace`` means ``facts``.

        Raises:
            PoolRefused: see :func:`check_facts`, or the name is too long.
        """
        check_facts(facts)
        if len(namespace) > MAX_NAME:
            raise PoolRefused(f"a namespace's name has {len(namespace)} characters, expected at most {MAX_NAME}")
        self.forget(namespace)
        if len(self._facts) >= MAX_DESCRIBED:
            most = max(self._of, key=lambda tenant: len(self._of[tenant]))
            self.forget(next(iter(self._of[most])))
        self._facts[namespace] = dict(facts)
        self._of.setdefault(tenant_of(namespace), {})[namespace] = None
        self._related.setdefault(_family(facts), {})[namespace] = None

    @property
    def all(self) -> dict[str, dict[str, str]]:
        return self._facts

    def forget(self, namespace: str) -> None:
        facts = self._facts.pop(namespace, None)
        if facts is None:
            return
        _remove(self._related, _family(facts), namespace)
        _remove(self._of, tenant_of(namespace), namespace)

    def facts(self, namespace: str) -> Mapping[str, str]:
        return self._facts.get(namespace, {})

    def related(self, namespace: str) -> Iterator[str]:
        """Other layouts of the model that ``namespace`` has."""
        facts = self._facts.get(namespace)
        if facts is not None:
            others = (name for name in reversed(self._related[_family(facts)]) if name != namespace)
            yield from islice(others, MAX_RELATED)

    def differences(self, namespace: str, other: str) -> Difference:
        mine, theirs = self._facts.get(namespace, {}), self._facts.get(other, {})
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return Difference(other, {name: (mine.get(name, ""), theirs.get(name, "")) for name in names})


def _family(facts: Mapping[str, str]) -> tuple[str, str, str]:
    return facts[TENANT], facts[MODEL], facts.get(PLANE, "")


def _remove(names: dict[_Group, dict[str, None]], group: _Group, name: str) -> None:
    del names[group][name]
    if not names[group]:
        del names[group]
