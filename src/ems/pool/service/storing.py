"""Reserving and committing: decisions of the core, and the headers that have to say so, in their order.

What always holds: a slot that came free is cleared before it is handed out again; a segment is noted and described
before a page of it is marked; a page is marked before its writer learns of it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from ems.pool.core.writing import Begun, Committed, Reserved
from ems.pool.layout import PageFlag
from ems.pool.pages import Outcome
from ems.pool.tiers.answers import Waking

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.keys import Tail
    from ems.pool.layout import PageRef
    from ems.pool.pages import Assigned, Page

Result = TypeVar("Result")
Steps = Generator[Waking | None, None, Result]
"""Work that is done a step at a time, with a result at its end; others have their turns in between.

It goes on in its next turn, or where it yields a :data:`Waking` once that has called.
"""
_NO_FLAG = PageFlag(0)

_log = structlog.get_logger("ems.node")


class Applier(Protocol):
    """Does to memory and files what was decided: at once, so in the order in which it is asked."""

    def clear_headers(self, slots: Collection[tuple[int, int]]) -> None:
        """The headers of these slots (segment, number) vouch for nothing any more."""

    def replace_memory(self, segment: int) -> None:
        """Put fresh memory in place of a segment's, before somebody else's pages come into it."""

    def note_tenant(self, segment: int, namespace: str) -> bool:
        """Write down whose pages ``segment`` is about to hold; whether that could be done."""

    def describe_segment(self, assigned: Assigned) -> None:
        """Write the description of a segment that was carved, unless it has no memory."""

    def mark_writing(self, pages: list[Page], page_size: int, client_id: int) -> None:
        """Say in the headers of ``pages`` that they are being written; before their writer learns of them."""

    def publish(self, done: Committed, checksums: Sequence[int] | None, flags: PageFlag) -> None:
        """Say in the headers of committed pages that they are whole, and keep the tokens of those that are not full."""

    def verify_page(self, ref: PageRef, key: bytes, length: int) -> Steps[bool]:
        """Look at the bytes of a page; whether they are right."""

    def quarantine_header(self, ref: PageRef, key: bytes) -> None:
        """Say in the header of a page with wrong bytes that its slot is not used again."""


class Storing:
    """What changes the slots of ``core``."""

    def __init__(self, core: PoolCore, applier: Applier) -> None:
        self._core = core
        self._applier = applier

    def reserve(
        self,
        client_id: int,
        namespace: int,
        parent: bytes,
        keys: list[bytes],
        tails: Sequence[Tail | None] = (),
        begun: Begun | None = None,
    ) -> Reserved:
        reserved = self._core.writing.reserve(client_id, namespace, parent, keys, tails, begun)
        # In this order: a slot may have been freed, and carved or granted, by this very request.
        self.clear()
        unnoted: list[int] = []
        for assigned in reserved.assigned:
            if assigned.renewed:
                self._applier.replace_memory(assigned.segment)
            elif not self._applier.note_tenant(assigned.segment, assigned.namespace):
                unnoted.append(assigned.segment)
                continue
            self._applier.describe_segment(assigned)
        if unnoted:
            return self._take_back(client_id, reserved, unnoted)
        if reserved.granted:
            self._applier.mark_writing(reserved.granted, reserved.page_size, client_id)
        return reserved

    def _take_back(self, client_id: int, reserved: Reserved, unnoted: list[int]) -> Reserved:
        """What was granted would lie in segments of which nobody would know whose they are."""
        if reserved.reservation:
            self._core.writing.abort(client_id, reserved.reservation)
        for segment in unnoted:
            self._core.slots.unassign(segment)
        none = bytes(Outcome.NO_SPACE if one == Outcome.GRANTED else one for one in reserved.outcomes)
        return Reserved(0, none, [], [], reserved.page_size)

    def commit(
        self,
        client_id: int,
        reservation: int,
        positions: list[int] | None = None,
        checksums: Sequence[int] | None = None,
        flags: PageFlag = _NO_FLAG,
    ) -> Committed:
        """Publish the pages at rising ``positions`` (all, when None), whose ``checksums`` come in this order."""
        done = self._core.writing.commit(client_id, reservation, positions)
        self._applier.publish(done, checksums, flags)
        return done

    def clear(self) -> None:
        """Slots that came free vouch for nothing any more."""
        freed = self._core.slots.freed()
        if freed:
            self._applier.clear_headers(freed)

    def tick(self, now: float) -> None:
        self._core.tick(now)
        segment = self._core.reclaimer.replace(now)
        if segment is not None:
            _log.warning("writers that were cut off go on, a segment's memory is replaced", segment=segment)
            self._applier.replace_memory(segment)
        for segment in self._core.reclaimer.shrink():
            self._applier.replace_memory(segment)
        self.clear()

    def spoilt(self, segment: int) -> None:
        """A segment, none of whose slots is out, is not what it was any more."""
        self._core.reclaimer.renew(self._core.slots.segments[segment])
        self._applier.replace_memory(segment)
