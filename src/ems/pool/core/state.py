"""What all parts of the brain share: slots, namespaces, what is held and by whom, and the time.

What always holds: the parts are used directly by whoever needs one; what several of them have to agree on is a verb of
:mod:`~ems.pool.core.writing`, :mod:`~ems.pool.core.reading`, :mod:`~ems.pool.core.damage` or of the whole brain.
"""

from __future__ import annotations

from collections.abc import Iterator

from ems.config import PolicyName
from ems.pool.core.answers import Counters
from ems.pool.core.changes import ChangeLog
from ems.pool.core.deferred_frees import DeferredFrees
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages, Namespaces
from ems.pool.core.pins import Announcements
from ems.pool.core.reclaim import Reclaimer
from ems.pool.core.reservations import Reservations
from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.pages import Page
from ems.pool.reasons.misses import MissReasons
from ems.pool.reasons.words import Reason
from ems.pool.writer import Writer, writer_of


class PoolState:
    """The parts of one node's brain.  ``client_id`` is a number that stands for one connection of a client."""

    def __init__(
        self,
        segment_sizes: list[int],
        *,
        high_watermark: float,
        eviction_ratio: float,
        policy: PolicyName,
        changes: ChangeLog | None,
        ids: Iterator[int] | None,
    ) -> None:
        self.now = 0.0
        self.slots = SlotAllocator(segment_sizes)
        self.namespaces = Namespaces(policy)
        self.changes = changes or ChangeLog()
        self.reasons = MissReasons(self.namespaces.pages_of)
        self.leases = Leases()
        self.reservations = Reservations()
        self.deferred = DeferredFrees(self.slots)
        self.announcements = Announcements()
        self.reclaimer = Reclaimer(self, high_watermark=high_watermark, eviction_ratio=eviction_ratio)
        self.shares = self.reclaimer.shares
        self.counters = Counters()
        self.writers: dict[int, Writer] = {}
        """Who writes through a connection, where that is known."""
        self.pending_deletes: set[Page] = set()
        """Pages that leave as soon as nobody reads them and nothing hangs on them; not found any more."""
        self.draining = False
        """Whether nothing new is taken in."""
        self._ids = ids
        self._next_id = 1

    def new_id(self) -> int:
        """A number for a lease, a reservation or an announcement."""
        if self._ids is not None:
            return next(self._ids)
        number = self._next_id
        self._next_id += 1
        return number

    def writer(self, client_id: int) -> Writer:
        """Who writes through a connection; one of its own where nobody was introduced."""
        return self.writers.get(client_id) or writer_of(client_id)

    def page(self, namespace: int, key: bytes) -> Page | None:
        return self.namespaces[namespace].index.get(key)

    def segment_tenant(self, segment: int) -> str | None:
        """The tenant whose pages ``segment`` holds; None when there is no such segment or nobody has it."""
        if not 0 <= segment < len(self.slots.segments):
            return None
        number = self.slots.segments[segment].namespace
        return None if number is None else self.namespaces[number].tenant

    def drop_unwritten(self, namespace: NamespacePages, page: Page) -> bytes:
        """Forget ``page``, whose writer does not commit it; where it lies, into which that may still be copying."""
        ref = page.ref
        namespace.index.discard(page)
        namespace.writing -= 1
        self.counters.pages_aborted += 1
        self.reasons.eviction_log.note(namespace.number, page.key, Reason.UNFINISHED.code)
        return ref

    # What was put off

    @property
    def unsettled(self) -> bool:
        """Whether :meth:`settle_some` has something to do."""
        return self.leases.unsettled or self.announcements.unsettled

    def settle_some(self) -> None:
        """Do a bounded part of what was put off: uses of leased pages, keys that are awaited or not any more."""
        self.leases.settle_some(self.now)
        self.announcements.settle_some()

    def settle(self) -> None:
        while self.unsettled:
            self.settle_some()
