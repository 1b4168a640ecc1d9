"""Gives a running pool another size, in whole segments: more at once, fewer step by step.

A brain; memory is had and given back by whoever carries out its :class:`Effect` list.  What always holds: a segment is
given up only when none of its slots is out; a page leaves only because its segment goes or its prefix does; what is
being read or written stays until that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ems.errors import PoolRefused
from ems.pool.administration.passes import RETRY_SECONDS, STEP
from ems.pool.core.eviction import doom
from ems.pool.core.index import Page
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.space import Segment, Space
from ems.pool.reasons.words import Reason
from ems.pool.segments.layout import refs_begin


class Effect(msgspec.Struct, frozen=True):
    """Memory to be had for segment ``segment`` (``size`` bytes), or all of its memory to be given back (size 0)."""

    segment: int
    size: int


class Plan(msgspec.Struct, frozen=True):
    """Segments to be added, of ``size`` bytes each, and those to be given up."""

    add: int
    give_up: tuple[int, ...]
    size: int
    segments: int


def plan(segments: list[Segment], wanted: int) -> Plan:
    """How to come to ``wanted`` bytes, at least one segment: those that hold least are given up first.

    A segment that is closed while nobody resizes has lost its memory for now and gets other memory: it counts, and
    cannot be given up.

    Raises:
        PoolRefused: there are more of those than wanted, or no segment at all.
    """
    have = [segment for segment in segments if segment.size and not segment.closing]
    lost = sum(bool(segment.size) and segment.closing for segment in segments)
    size = max((segment.size for segment in segments), default=0)
    if not size:
        raise PoolRefused("the pool has no segment whose size others could have, restart it with a --size")
    count = max(wanted // size, 1)
    if lost > count:
        raise PoolRefused(
            f"{lost} segments wait for memory in the place of what was taken from them and cannot be given up before "
            f"they have it, {count} were asked for; free shared memory and try again, or restart the node"
        )
    least = sorted(have, key=lambda segment: (segment.owner is not None, segment.used, -segment.number))
    going = tuple(segment.number for segment in least[: max(len(have) + lost - count, 0)])
    return Plan(max(count - len(have) - lost, 0), going, size, count)


class Pages(Protocol):
    """What a pass needs of the pool."""

    @property
    def namespaces(self) -> Sequence[NamespacePages]:
        """All namespaces."""

    @property
    def space(self) -> Space:
        """The segments and their slots."""

    def take_out(self, namespace: NamespacePages, page: Page, reason: Reason) -> None:
        """Let a page leave that nobody reads and nothing hangs on."""

    def forgive(self, segment: int) -> None:
        """The quarantined slots of ``segment`` may go with it, once no other of its slots is out."""

    def doom(self, page: Page) -> None:
        """From now on ``page`` is not found any more, though it is still being read."""

    def pardon(self, page: Page) -> None:
        """``page`` may be found again."""


class Shrinking:
    """Empties the segments ``numbers`` and gives them up, one after the other."""

    def __init__(self, pages: Pages, numbers: tuple[int, ...], effects: list[Effect]) -> None:
        self._pages = pages
        self._effects = effects
        self._waiting = list(numbers)
        self._freeing: set[int] = set()
        self._look_again_at = 0.0
        self._segment: Segment | None = None
        self._left: list[Page] = []
        self._later: dict[Page, None] = {}
        self.removed = 0
        for number in numbers:
            pages.space.close(number)
            owner = pages.space.segments[number].owner
            if owner is not None:
                pages.namespaces[owner].index.policy.resize(pages.space.capacity(owner))

    @property
    def done(self) -> bool:
        """Whether all of them are given up and their memory is given back."""
        return self._segment is None and not self._waiting and not self._freeing

    def freed(self, number: int) -> None:
        """The memory of segment ``number`` was given back."""
        self._freeing.discard(number)

    def step(self, now: float) -> bool:
        """Go on; whether there is something to be done right away."""
        if self._segment is None:
            if not self._waiting:
                return False
            self._begin(self._pages.space.segments[self._waiting.pop()])
        assert self._segment is not None
        budget = STEP
        while self._left and budget > 0:
            page = self._left.pop()
            budget -= 1
            if page.present and page.ref.startswith(refs_begin(self._segment.number)):
                budget -= self._empty(page)
        if self._left:
            return True
        if self._later and now >= self._look_again_at:
            self._look_again_at = now + RETRY_SECONDS
            doomed: dict[Page, None] = {}
            for page in self._later:  # on which others may hang that came since
                doom(page, doomed)
            self._take_out(list(doomed))
        self._pages.forgive(self._segment.number)
        if self._segment.used:
            return self._again(now)
        self._end(self._segment)
        return True

    def _begin(self, segment: Segment) -> None:
        self._segment = segment
        self._look_again_at = 0.0
        self._list(segment)

    def _list(self, segment: Segment) -> None:
        self._left = [] if segment.owner is None else list(self._pages.namespaces[segment.owner].index)

    def _empty(self, page: Page) -> int:
        """Let ``page`` leave with all that hangs on it; how many pages that were."""
        doomed: dict[Page, None] = {}
        doom(page, doomed)
        self._take_out(list(doomed))
        return len(doomed)

    def _take_out(self, doomed: list[Page]) -> None:
        """Let pages leave, suffixes before their prefixes; what is in use is tried again later."""
        assert self._segment is not None
        if self._segment.owner is None:
            return
        namespace = self._pages.namespaces[self._segment.owner]
        for page in doomed:
            if not page.present or namespace.index.get(page.key) is not page:
                self._forget(page)
            elif page.leases or page.suffixes is not None:
                self._pages.doom(page)
                self._later[page] = None
            else:
                self._forget(page)
                namespace.kept.unpin((page.key,))
                self._pages.take_out(namespace, page, Reason.EVICTED_RESIZE)
                self.removed += 1

    def _forget(self, page: Page) -> None:
        if page in self._later:
            del self._later[page]
            self._pages.pardon(page)

    def _again(self, now: float) -> bool:
        """What was being written when it was looked at may be present by now."""
        if not self._later and now >= self._look_again_at and self._segment is not None:
            self._look_again_at = now + RETRY_SECONDS
            self._list(self._segment)
        return False

    def _end(self, segment: Segment) -> None:
        for page in list(self._later):
            self._forget(page)
        self._pages.space.give_up(segment.number)
        self._freeing.add(segment.number)
        self._effects.append(Effect(segment.number, 0))
        self._segment = None

    def report(self) -> dict[str, object]:
        """How far it is."""
        return {"removed": self.removed, "emptying": len(self._waiting) + (self._segment is not None)}
