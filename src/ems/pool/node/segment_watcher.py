"""Looks whether clients left the segments that they may write into as the node made them.

What always holds: what somebody did to a file costs the pages in it and nothing else; who did it is named once.  A file
that was cut, or from which memory was taken, is set aside with its pages: the segment begins anew in another file.  One
that was made longer is cut back, and keeps its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.segments.arena import Arena

_log = structlog.get_logger("ems.node")


class SegmentWatcher:
    """The guard of one node's segments."""

    def __init__(self, core: PoolCore, arena: Arena) -> None:
        self._core = core
        self._arena = arena
        self._longer: set[int] = set()
        """Segments whose clients were named because they made the file longer."""

    def look(self) -> list[int]:
        """Look once; the segments that hold nothing any more and whose memory is to be replaced."""
        for number in self._arena.cut_back():
            if number not in self._longer:
                self._longer.add(number)
                _log.warning(
                    "a client made a segment's file longer, it is cut back", segment=number, tenant=self._tenant(number)
                )
        return [number for number in self._arena.hurt() if self._set_aside(number)]

    def _tenant(self, number: int) -> str:
        tenant = self._core.segment_tenant(number)
        return (self._core.slots.segments[number].tenant if tenant is None else tenant) or ""

    def _set_aside(self, number: int) -> bool:
        """Drop what lay in a segment whose file is not whole; whether its memory is to be replaced."""
        space = self._core.slots
        segment = space.segments[number]
        if not segment.size or space.is_lost(number):
            return False
        tenant, pages = self._tenant(number), self._core.damage.drop_segment(number)
        if segment.closing:
            return False  # it is being given up, and its file is looked at when it comes back
        _log.error(
            "a segment's file was cut by a client, its pages are gone and it begins anew",
            segment=number,
            tenant=tenant,
            pages=pages,
        )
        return True
