"""Reserving and committing: decisions of the core, and the headers that have to say so, in their order.

What always holds: a slot that came free is cleared before it is handed out again; a segment is noted and described
before a page of it is marked; a page is marked before its writer learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from ems.pool.core.writing import Begun, Committed, Reserved
from ems.pool.layout import PageFlag
from ems.pool.pages import Outcome
from ems.pool.service import effects
from ems.pool.service.effects import Work

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.keys import Tail


_NO_FLAG = PageFlag(0)

_log = structlog.get_logger("ems.node")


class Storing:
    """What changes the slots of ``core``."""

    def __init__(self, core: PoolCore) -> None:
        self._core = core

    def reserve(
        self,
        client_id: int,
        namespace: int,
        parent: bytes,
        keys: list[bytes],
        tails: Sequence[Tail | None] = (),
        begun: Begun | None = None,
    ) -> Work[Reserved]:
        reserved = self._core.writing.reserve(client_id, namespace, parent, keys, tails, begun)
        # In this order: a slot may have been freed, and carved or granted, by this very request.
        yield from self.clear()
        unnoted: list[int] = []
        for assigned in reserved.assigned:
            if assigned.renewed:
                yield effects.ReplaceMemory(assigned.segment)
            elif not (yield effects.NoteTenant(assigned.segment, assigned.namespace)):
                unnoted.append(assigned.segment)
                continue
            yield effects.DescribeSegment(assigned)
        if unnoted:
            return self._take_back(client_id, reserved, unnoted)
        if reserved.granted:
            yield effects.MarkWriting(reserved.granted, reserved.page_size, client_id)
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
        checksums: Mapping[int, int] | None = None,
        flags: PageFlag = _NO_FLAG,
    ) -> Work[Committed]:
        """Publish the pages at ``positions`` (all, when None), whose ``checksums`` are by position."""
        done = self._core.writing.commit(client_id, reservation, positions)
        yield effects.Publish(done, None if checksums is None else [checksums[one] for one in done.positions], flags)
        return done

    def clear(self) -> Work[None]:
        """Slots that came free vouch for nothing any more."""
        freed = self._core.slots.freed()
        if freed:
            yield effects.ClearHeaders(freed)

    def tick(self, now: float) -> Work[None]:
        self._core.tick(now)
        segment = self._core.reclaimer.replace(now)
        if segment is not None:
            _log.warning("writers that were cut off go on, a segment's memory is replaced", segment=segment)
            yield effects.ReplaceMemory(segment)
        for segment in self._core.reclaimer.shrink():
            yield effects.ReplaceMemory(segment)
        yield from self.clear()

    def spoilt(self, segment: int) -> Work[None]:
        """A segment, none of whose slots is out, is not what it was any more."""
        self._core.reclaimer.renew(self._core.slots.segments[segment])
        yield effects.ReplaceMemory(segment)
