"""Gives a running pool another size, in whole segments: more at once, fewer step by step.

A brain; memory is had and given back by others.  What always holds: a segment is given up only when none of its slots
is out; a page leaves only because its segment goes or its prefix does; what is being read or written stays until that
is over.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ems.config import format_size
from ems.errors import PoolRefused
from ems.pool.administration.passes import STEP, Leaving
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.slot_allocator import Segment
from ems.pool.layout import refs_begin
from ems.pool.reasons.words import Reason


class Plan(msgspec.Struct, frozen=True):
    """Segments to be added, of ``size`` bytes each, and those to be given up."""

    add: int
    give_up: tuple[int, ...]
    size: int
    segments: int


def plan(segments: list[Segment], wanted: int) -> Plan:
    """How to come to ``wanted`` bytes in whole segments: those that hold least are given up first.

    A segment that is closed while nobody resizes has lost its memory for now and gets other memory: it counts, and
    cannot be given up.

    Raises PoolRefused: there are more of those than wanted, or less than one segment is, or there is none.
    """
    have = [segment for segment in segments if segment.size and not segment.closing]
    lost = sum(bool(segment.size) and segment.closing for segment in segments)
    size = max((segment.size for segment in segments), default=0)
    if not size:
        raise PoolRefused("the pool has no segment whose size others could have, restart it with a --size")
    if wanted < size:
        raise PoolRefused(
            f"the pool was to have {format_size(wanted)}, expected {format_size(size)} or more: a segment has as much"
        )
    count = wanted // size
    if lost > count:
        raise PoolRefused(
            f"{lost} segments wait for memory in the place of what was taken from them and cannot be given up before "
            f"they have it, {count} were asked for; free shared memory and try again, or restart the node"
        )
    least = sorted(have, key=lambda segment: (segment.namespace is not None, segment.used, -segment.number))
    going = tuple(segment.number for segment in least[: max(len(have) + lost - count, 0)])
    return Plan(max(count - len(have) - lost, 0), going, size, count)


class Shrinking:
    """Empties the segments ``numbers`` and adds each to ``given_up`` as soon as it is empty."""

    def __init__(self, pool: PoolCore, numbers: tuple[int, ...], given_up: list[int]) -> None:
        self._pool = pool
        self._given_up = given_up
        self._emptying = set(numbers)
        self._freeing: set[int] = set()
        self._leaving = Leaving(pool, lambda _namespace, _page: True, Reason.EVICTED_RESIZE)
        for number in numbers:
            pool.slots.close(number)
        self._resize_policies(numbers)
        self._begins = tuple(refs_begin(number) for number in numbers)
        owners = {pool.slots.segments[number].namespace for number in numbers}
        self._unseen = [(one, page) for one in pool.namespaces if one.number in owners for page in one.index]

    def _resize_policies(self, numbers: Iterable[int]) -> None:
        slots = self._pool.slots
        for client_id in {slots.segments[number].namespace for number in numbers}:
            if client_id is not None:
                self._pool.namespaces[client_id].index.policy.resize(slots.capacity(client_id))

    @property
    def done(self) -> bool:
        """Whether all of them are given up and their memory is given back."""
        return not self._emptying and not self._freeing

    def freed(self, number: int) -> None:
        self._freeing.discard(number)

    def cancel(self) -> int:
        """Keep the segments that are not empty yet; how many these are."""
        kept, self._emptying = self._emptying, set()
        self._unseen.clear()
        self._leaving.stop()
        for number in kept:
            self._pool.slots.reopen(number)
        self._resize_policies(kept)
        return len(kept)

    def step(self, now: float) -> bool:
        at_once = True
        for _ in range(STEP):
            if self._leaving.work(now, again=not self._unseen):
                continue
            if not self._unseen:
                at_once = False
                break
            namespace, page = self._unseen.pop()
            if page.ref.startswith(self._begins):
                self._leaving.add(namespace, page)
        for number in sorted(self._emptying):
            if self._pool.deferred.fills(number):  # slots that are not used again go with the memory
                self._pool.deferred.drop_segment(number)
            if not self._pool.slots.segments[number].used:
                self._emptying.remove(number)
                self._pool.slots.give_up(number)
                self._freeing.add(number)
                self._given_up.append(number)
        return at_once

    def report(self) -> dict[str, object]:
        held_by = msgspec.to_builtins(self._leaving.held_by if self._emptying else [])
        return {"removed": self._leaving.left, "emptying": len(self._emptying), "held_by": held_by}
