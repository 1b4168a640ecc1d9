"""Facts: how engines describe what a namespace means, as plain words such as ``block_size: 16``.

Data types and their bounds; what is known of namespaces is kept in :mod:`ems.pool.reasons.layouts`.
"""

from __future__ import annotations

import hashlib
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
