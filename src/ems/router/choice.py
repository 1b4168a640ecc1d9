"""Which instance takes a request: one that is not doubted, then the least loaded, then the one that waited longest.

The first rule keeps requests away from an instance that fails fast and is idle therefore; the last one makes serial
traffic, where every load is zero, go round instead of always to the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ems.router.fleet import Instance


def pick(usable: Iterable[Instance], tried: Collection[Instance] = (), *, again: bool = False) -> Instance | None:
    """Choose among usable instances; those tried before only when ``again`` and nobody else is left."""
    fresh: Instance | None = None
    stale: Instance | None = None
    for instance in usable:
        if instance in tried:
            if stale is None or _rank(instance) < _rank(stale):
                stale = instance
        elif fresh is None or _rank(instance) < _rank(fresh):
            fresh = instance
    if fresh is None and again:
        return stale
    return fresh


def _rank(instance: Instance) -> tuple[bool, int, int]:
    return instance.breaker.doubted, instance.load, instance.turn
