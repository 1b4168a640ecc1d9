"""Where pages are, as KV events call it, and the names under which a node's changes tell of it.

What changes in memory is told under the namespace's own name, what changes in a tier under that name and a medium: so
an engine and a node of different releases understand each other, and tenants are kept apart as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY, STORAGE, EXTERNAL = "CPU", "STORAGE", "EXTERNAL"
"""This host's memory; folders and object stores; the memory of other hosts.  vLLM has the first two."""
MEDIA = (MEMORY, STORAGE, EXTERNAL)


def named(namespace: str, medium: str) -> str:
    """What changes of ``namespace`` in ``medium`` are called."""
    return namespace if medium == MEMORY else f"{namespace}//{medium}"


def medium_of(kind: str) -> str:
    """The medium of a tier of this kind."""
    return EXTERNAL if kind == "mooncake" else STORAGE


def asked_for(namespaces: Sequence[str]) -> list[str]:
    """All changes of ``namespaces``: those of each medium together, in the order of :data:`MEDIA`."""
    return [named(name, medium) for medium in MEDIA for name in namespaces]
