"""What namespaces mean, as far as their engines described them: so that a miss can name what differs.

A brain.  A description is a map of plain words, such as ``block_size: 16``; the namespace's name has their hash only.
Namespaces are related when they are the same plane of the same model of the same tenant.  What always holds: memory is
bounded; a description changes nothing about which pages meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import msgspec

from ems.errors import PoolRefused

MAX_DESCRIBED = 1024
"""Namespaces whose descriptions are kept; the oldest leave first."""
MAX_NAME = 512
"""Characters of the longest name of a namespace."""
MAX_FACTS = 48
MAX_CHARACTERS = 8192
"""Characters of one description."""
MAX_TEXT = 160
"""Characters of a fact that are worth showing; longer ones are told apart by their digest."""

TENANT, MODEL, PLANE = "tenant", "model", "plane"
"""The facts by which namespaces are related; a description has at least the first two."""


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

    Raises:
        PoolRefused: they are too many, too long, or name no tenant and model.
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
        self._facts: dict[str, dict[str, str]] = {}
        self._related: dict[tuple[str, str, str], dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._facts)

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
            self.forget(next(iter(self._facts)))
        self._facts[namespace] = dict(facts)
        self._related.setdefault(_family(facts), {})[namespace] = None

    @property
    def all(self) -> dict[str, dict[str, str]]:
        """All descriptions by name."""
        return self._facts

    def forget(self, namespace: str) -> None:
        """``namespace`` is described no more."""
        facts = self._facts.pop(namespace, None)
        if facts is None:
            return
        related = self._related[_family(facts)]
        del related[namespace]
        if not related:
            del self._related[_family(facts)]

    def facts(self, namespace: str) -> Mapping[str, str]:
        """The description of ``namespace``, empty when there is none."""
        return self._facts.get(namespace, {})

    def related(self, namespace: str) -> Iterator[str]:
        """Other layouts of the model that ``namespace`` has."""
        facts = self._facts.get(namespace)
        if facts is not None:
            yield from (name for name in self._related[_family(facts)] if name != namespace)

    def differences(self, namespace: str, other: str) -> Difference:
        """What ``other`` has otherwise than ``namespace``."""
        mine, theirs = self._facts.get(namespace, {}), self._facts.get(other, {})
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return Difference(other, {name: (mine.get(name, ""), theirs.get(name, "")) for name in names})


def _family(facts: Mapping[str, str]) -> tuple[str, str, str]:
    return facts[TENANT], facts[MODEL], facts.get(PLANE, "")
