"""What is done about pages with wrong bytes and segments that are not what they were any more.

What always holds: nobody finds such a page again; leases promise it no longer, and their holders see so from
its header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.pool.layout import PageRef, refs_begin
from ems.pool.reasons.eviction_log import NOBODY
from ems.pool.reasons.words import Reason

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.pages import Page


class Damage:
    """What was damaged on one node."""

    def __init__(self, state: PoolCore) -> None:
        self._state = state

    def find(self, namespace: int, key: bytes, ref: bytes) -> Page | None:
        """The present page of ``key`` if it still lies at ``ref``, in that generation."""
        page = self._state.namespaces.opened(namespace).index.get(key)
        return page if page is not None and page.present and page.ref == ref else None

    def quarantine(self, namespace: int, page: Page) -> None:
        """The bytes of a present page are wrong: nobody finds it any more, and its slot is not used again.

        Leases on it promise it no longer; their holders see from its header that it is gone.
        """
        ns = self._state.namespaces.opened(namespace)
        self._state.leases.break_off(page)
        self._state.deferred.quarantine(page.ref)
        self._state.reasons.eviction_log.note(namespace, page.key, Reason.CHECKSUM.code)
        if self._state.changes.recording():
            self._state.changes.removed(ns.name, page.key)
        ns.index.discard(page)
        self._state.counters.pages_corrupt += 1

    def drop_segment(self, segment: int) -> int:
        """``segment`` is not what it was any more: all that lay there is gone, whoever holds it; none of it is out.

        Leases promise its pages no longer, and what was to be written there cannot be committed.  Returns how many
        pages could be read before.
        """
        number = self._state.slots.segments[segment].namespace
        if number is None:
            return 0
        self._state.settle()
        ns, begin = self._state.namespaces[number], refs_begin(segment)
        for page in self._state.reservations.drop_segment(ns, begin):
            self._state.slots.give_back(PageRef.unpack(self._state.drop_unwritten(ns, page)))
        lost = [page for page in ns.index if page.ref.startswith(begin)]
        for page in lost:
            self._state.leases.break_off(page)
        ns.pins.unpin([page.key for page in lost])
        for page in lost:
            self._state.pending_deletes.discard(page)
            self._state.reclaimer.let_go(ns, Reason.CHECKSUM.code, NOBODY, page)
            ns.index.discard(page)
        self._state.counters.pages_corrupt += len(lost)
        self._state.deferred.drop_segment(segment)
        return len(lost)
