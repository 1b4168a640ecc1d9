"""The memory of a node's segments: touched in a thread, replaced before another tenant has it or where it was spoilt.

What always holds: segments are touched one after the other, in the order in which that was asked for; nobody is given a
slot in memory that was another tenant's (:attr:`Memory.lost`).  What a client did to a segment's file costs the pages
in it and nothing else, and is said once: a file that was cut, or from which memory was taken, is set aside with its
pages, and the segment begins anew in another; one that was made longer is cut back, and keeps its pages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from ems.pool.node.pool_node import Node

READY_BYTES = 64 << 20
"""Touched before anybody is served: what comes first can be stored, and a node is ready hardly later for it."""
Touching = Callable[[Callable[[int, int], None]], str | None]
"""Touches memory and tells how far it is; why memory ran out, None when it did not."""

_log = structlog.get_logger("ems.node")


class Memory:
    """The memory of the segments of ``host``."""

    def __init__(self, host: Node) -> None:
        self._host = host
        self.lost: set[int] = set()
        """Segments whose memory cannot be replaced for now."""
        self._longer: set[int] = set()
        """Segments of which it was said that a client made their file longer."""
        self._stop = threading.Event()
        self._prefaulter: threading.Thread | None = None
        self._touching = 0
        """Threads that touch memory, or will."""

    def touch_first(self, segments: list[int]) -> None:
        """Touch the first :data:`READY_BYTES` of ``segments`` and return; what is wrong with them shows later."""
        enough, touched = threading.Event(), Counter[int]()

        def progress(segment: int, so_far: int) -> None:
            self._host.core.slots.touch(segment, so_far)
            touched[segment] = so_far
            if touched.total() >= READY_BYTES:
                enough.set()

        self._host.arena.prefault(progress, enough, segments)

    def touch_more(self, segments: list[int]) -> None:
        """Touch ``segments`` in the background, after those that came before."""
        self._touch(lambda progress: self._host.arena.prefault(progress, self._stop, segments))

    def renew(self, segment: int) -> None:
        """Replace the memory of a segment and have the new one touched; where that fails, nobody has it for now."""
        try:
            retired = self._host.arena.renew(segment)
        except OSError as error:
            self.lose(segment, error)
            return
        self._touch(lambda progress: self._host.arena.refill(retired, progress, self._stop))
        try:
            # Not before: until here the old memory was in place, and is its tenant's should the node end.
            self._host.tenancy.put_owner(segment, self._host.core.segment_tenant(segment) or "")
        except OSError as error:
            self.lose(segment, error)
            return
        if segment in self.lost:
            self.lost.discard(segment)
            self._host.core.slots.regain(segment)

    def lose(self, segment: int, error: OSError) -> None:
        """Memory of another tenant stayed in place: no slot of it is handed out before it was replaced."""
        if segment in self.lost:
            return
        self.lost.add(segment)
        self._host.core.reclaimer.lose(segment)
        self.touch_more([])  # nothing: then no more is being touched, unless something else is
        _log.error("a segment's memory cannot be replaced, it is tried again", segment=segment, reason=error.strerror)

    def renew_lost(self) -> None:
        """Try again where memory could not be replaced, once nothing is being touched."""
        if not self._touching:
            for segment in sorted(self.lost):
                self.renew(segment)

    def look_after(self) -> None:
        """Replace what clients spoilt; where memory is still being touched, once that is over."""
        slots = self._host.core.slots
        for number in self._host.arena.cut_back():
            if number not in self._longer:
                self._longer.add(number)
                tenant = self._tenant(number)
                _log.warning("a client made a segment's file longer, it is cut back", segment=number, tenant=tenant)
        for number in filter(self._set_aside, self._host.arena.hurt()):
            if slots.settled(slots.segments[number]):
                self._host.storing.spoilt(number)
            else:
                self.lost.add(number)
                self._host.core.reclaimer.lose(number)

    def _tenant(self, number: int) -> str:
        tenant = self._host.core.segment_tenant(number)
        return (self._host.core.slots.segments[number].tenant if tenant is None else tenant) or ""

    def _set_aside(self, number: int) -> bool:
        """Drop what lay in a segment whose file is not whole; whether its memory is to be replaced."""
        segment = self._host.core.slots.segments[number]
        if not segment.size or self._host.core.slots.is_lost(number):
            return False
        tenant, pages = self._tenant(number), self._host.core.drop_segment(number)
        if segment.closing:
            return False  # it is being given up, and its file is looked at when it comes back
        _log.error(
            "a segment's file was cut by a client, its pages are gone and it begins anew",
            segment=number,
            tenant=tenant,
            pages=pages,
        )
        return True

    def _touch(self, work: Touching) -> None:
        self._touching += 1
        arguments = (work, self._prefaulter)
        self._prefaulter = threading.Thread(target=self._prefault, args=arguments, name="ems-prefault", daemon=True)
        self._prefaulter.start()

    def _prefault(self, work: Touching, before: threading.Thread | None) -> None:
        def progress(segment: int, touched: int) -> None:
            self._in_loop(self._host.core.slots.touch, segment, touched)

        if before is not None:
            before.join()
        shortage = work(progress)
        if not self._stop.is_set():
            self._in_loop(self._prefaulted, shortage)

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        if not self._stop.is_set():
            self._host.loop.call_soon_threadsafe(call, *args)

    def _prefaulted(self, shortage: str | None) -> None:
        if self._stop.is_set():
            return
        self._touching -= 1
        if not self._touching:
            self._host.core.slots.touching_ended()
        figures = self._host.core.stats()
        if shortage is None:
            _log.info("segments touched", bytes=figures["bytes_touched"])
        else:
            _log.warning(
                "shared memory ran out, the pool is smaller than asked for",
                reason=shortage,
                asked=figures["bytes_total"],
                usable=figures["bytes_touched"],
            )

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        if self._prefaulter is not None:
            self._prefaulter.join()
