"""Lets pages leave memory, or pins them, in steps between which clients are served.

Brains.  What always holds: a step looks at a bounded number of pages; a page leaves once its last suffix has left,
in whatever order the pages came; what somebody reads or writes is waited for, and not found any more till then; what
came to continue a page that leaves is of no use without it, and leaves too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.pool_core import PoolCore
from ems.pool.pages import Page
from ems.pool.reasons.eviction_log import NOBODY
from ems.pool.reasons.words import Reason

STEP = 256
"""Pages that one step looks at, well below a millisecond's work."""
PATIENCE = 30.0
"""Seconds that a clear waits for readers and writers of pages that are to leave."""
RETRY_SECONDS = 0.05
"""Time between two looks at pages that could not leave, for each :data:`RETRY_PAGES` of them."""
RETRY_PAGES = 4096


class Holder(msgspec.Struct):
    """Who reads or writes some pages: how many of its leases and reservations have any, and how many these are."""

    client_id: int
    leases: int = 0
    reservations: int = 0
    pages: int = 0


def holders(core: PoolCore, pages: Collection[Page]) -> list[Holder]:
    found: dict[int, Holder] = {}
    leases, reservations = core.leases, core.reservations.all.values()
    held = [(one.client_id, 1, 0, leases.pages(one.client_id, number)) for number, one in leases.all.items()]
    held += [(one.client_id, 0, 1, list(one.waiting.values())) for one in reservations]
    for client_id, read, written, theirs in held:
        if count := sum(page in pages for page in theirs):
            holder = found.setdefault(client_id, Holder(client_id))
            holder.leases += read
            holder.reservations += written
            holder.pages += count
    return list(found.values())


class Leaving:
    """Pages that are to leave because of ``reason``, with what hangs on them as far as that is ``matches``."""

    def __init__(self, core: PoolCore, matches: Callable[[NamespacePages, Page], bool], reason: Reason) -> None:
        self._core = core
        self._matches = matches
        self._reason = reason
        self._new: list[tuple[NamespacePages, Page]] = []
        self._ready: list[Page] = []
        """Pages whose last suffix has just left."""
        self._waiting: dict[Page, NamespacePages] = {}
        """Pages that could not leave yet, and those that are being written."""
        self._round: Iterator[Page] | None = None
        """The rest of what waits, where that is being looked at once more."""
        self._looked_at = -math.inf
        self._before = (0, 0)
        """How many had been met, and had left, when that began."""
        self._passing = False
        """Whether something was met there that ends by itself."""
        self.met = 0
        self.bytes = 0
        self.left = 0
        """Pages of those met that are not there any more, whoever let them leave."""
        self.held_by: list[Holder] = []

    @property
    def done(self) -> bool:
        return not (self._new or self._ready or self._waiting)

    def add(self, namespace: NamespacePages, page: Page) -> None:
        """``page`` is to leave, if it is ``matches``."""
        self._new.append((namespace, page))

    def work(self, now: float, *, again: bool, last: bool = False) -> bool:
        """Look at one page; False where nothing is to be done for now.

        With ``again``, when all are known, what could not leave is looked at again.  The ``last`` time, what still
        cannot leave may be found again and is waited for no longer.
        """
        if self._ready:
            self._look_again(self._ready.pop())
        elif self._new:
            self._begin(*self._new.pop())
        elif self._round is not None:
            page = next(self._round, None)
            if page is None:
                self._end_round(now, last=last)
            else:
                self._look_again(page)
        elif not again or not self._waiting or (self._rests(now) and not last):
            return False
        else:
            self._round, self._before, self._passing = iter(list(self._waiting)), (self.met, self.left), False
        return True

    def _rests(self, now: float) -> bool:
        """Whether all that waits was looked at a moment ago; the clock may have been set back since."""
        return 0 <= now - self._looked_at < RETRY_SECONDS * max(1.0, len(self._waiting) / RETRY_PAGES)

    def stop(self) -> None:
        """What could not leave by now stays."""
        for page in self._waiting:
            self._core.pending_deletes.discard(page)
        self._waiting.clear()
        self._new.clear()
        self._ready.clear()
        self._round = None

    def _begin(self, namespace: NamespacePages, page: Page) -> None:
        if page in self._waiting:
            return
        if namespace.index.get(page.key) is not page:
            if not page.ref:  # it is missing, and others hang on it
                self._new += [(namespace, suffix) for suffix in page.children()]
        elif self._matches(namespace, page):
            self.met += 1
            self.bytes += namespace.page_size
            self._take(namespace, page)

    def _take(self, namespace: NamespacePages, page: Page) -> None:
        """Let ``page`` leave, and then what it continues; or wait for what keeps it."""
        if not page.present or page.leases or page.suffixes is not None:
            if page.present:
                self._core.pending_deletes.add(page)
            self._waiting[page] = namespace
            self._new += [(namespace, suffix) for suffix in page.children()]
            return
        above = page.parent
        while above is not None and not above.ref:  # it is missing
            above = above.parent
        self._waiting.pop(page, None)
        namespace.pins.unpin((page.key,))
        self._core.pending_deletes.discard(page)
        namespace.index.discard(page)
        self._core.reclaimer.let_go(namespace, self._reason.code, NOBODY, page)
        self.left += 1
        if above is not None and above in self._waiting and above.suffixes is None:
            self._ready.append(above)

    def _look_again(self, page: Page) -> None:
        namespace = self._waiting.get(page)
        if namespace is None:
            return
        if namespace.index.get(page.key) is not page:  # it left by itself, or its writer did not finish
            self._forget(page)
            self.left += 1
        elif not self._matches(namespace, page):  # it was pinned meanwhile
            self._forget(page)
        else:
            self._passing = self._passing or not page.present or page.leases > 0
            self._take(namespace, page)

    def _forget(self, page: Page) -> None:
        self._core.pending_deletes.discard(page)
        del self._waiting[page]

    def _end_round(self, now: float, *, last: bool) -> None:
        self._round = None
        self.held_by = holders(self._core, self._waiting.keys())
        self._looked_at = now
        # Where nothing met ends by itself, what they wait for is not meant.
        if last or (not self._passing and self._before == (self.met, self.left)):
            self.stop()


class Clearing:
    """Takes out the pages of ``namespaces`` that were last used at ``oldest`` (None: at any time) or before.

    What a pinned page, or one that is too young, continues stays as well.  Pages that are being written when it begins
    are meant too, unless there is an age.  With ``dry_run`` it only counts.
    """

    def __init__(
        self, core: PoolCore, namespaces: Sequence[NamespacePages], oldest: float | None, now: float, *, dry_run: bool
    ) -> None:
        self._oldest = oldest
        self._dry_run = dry_run
        self._give_up_at = now + PATIENCE
        self._leaving = Leaving(core, self.matches, Reason.CLEARED)
        lists = [(namespace, list(namespace.index)) for namespace in namespaces]
        may_stay = oldest is not None or any(namespace.pins.pinned for namespace in namespaces)
        self._unmarked = [(namespace, iter(listed)) for namespace, listed in lists] if may_stay else []
        self._unseen = [(namespace, reversed(listed)) for namespace, listed in lists]
        self._staying: set[Page] = set()
        """Pages that are not meant, and those on which they hang."""
        self._path: tuple[Page | None, bool] = (None, False)
        """From where on such a prefix is still to be noted, and whether because of a pin."""
        self.total = sum(len(listed) for _, listed in lists)
        self.looked_at = 0
        self.pinned = 0

    @property
    def done(self) -> bool:
        return not self._unmarked and not self._unseen and self._leaving.done

    def matches(self, namespace: NamespacePages, page: Page) -> bool:
        """Whether ``page``, which is present or being written, is to leave."""
        return self._old_enough(page) and page.key not in namespace.pins.pinned and page not in self._staying

    def _old_enough(self, page: Page) -> bool:
        return self._oldest is None or (page.present and page.used <= self._oldest)

    def step(self, now: float) -> bool:
        for _ in range(STEP):
            if self._path[0] is not None:
                self._mark_prefix()
            elif self._unmarked:
                self._mark()
            elif self._leaving.work(now, again=not self._unseen, last=now >= self._give_up_at):
                continue
            elif self._unseen:
                self._look()
            else:
                return False
        return not self.done

    def _mark(self) -> None:
        namespace, pages = self._unmarked[-1]
        page = next(pages, None)
        if page is None:
            self._unmarked.pop()
        elif namespace.index.get(page.key) is page and not self.matches(namespace, page):
            self._path = (page, self._old_enough(page))

    def _mark_prefix(self) -> None:
        page, pinned = self._path
        if page is None or page in self._staying:
            self._path = (None, False)
        else:
            self._staying.add(page)
            self.pinned += pinned and page.present
            self._path = (page.parent, pinned)

    def _look(self) -> None:
        namespace, pages = self._unseen[-1]
        page = next(pages, None)
        if page is None:
            self._unseen.pop()
            return
        self.looked_at += 1
        if not self._dry_run:
            self._leaving.add(namespace, page)
        elif namespace.index.get(page.key) is page and self.matches(namespace, page):
            self._leaving.met += 1
            self._leaving.bytes += namespace.page_size

    def report(self) -> dict[str, object]:
        leaving = self._leaving
        pins = 0 if self._dry_run else leaving.met - leaving.left
        return {
            "pages": self.total,
            "looked_at": self.looked_at,
            "matched": leaving.met,
            "bytes": leaving.bytes,
            "removed": leaving.left,
            "kept": pins,
            "pinned": self.pinned,
            "held_by": msgspec.to_builtins(leaving.held_by if pins else []),
        }


class Pinning(msgspec.Struct):
    """Pins ``left`` of ``namespace`` until ``until``, or takes their pins off (None); ``dry_run`` only counts."""

    core: PoolCore
    namespace: NamespacePages
    left: list[bytes]
    until: float | None
    dry_run: bool
    pages: int = 0
    refused: int = 0

    def step(self, _now: float) -> bool:
        keys, self.left = self.left[-STEP:], self.left[:-STEP]
        known = map(self.namespace.index.get, keys)
        present = [page.key for page in known if page is not None and page.present]
        if self.until is None:
            pinned = [key for key in keys if key in self.namespace.pins.pinned]
            self.pages += len(pinned) if self.dry_run else self.namespace.pins.unpin(pinned)
        elif self.dry_run:
            self.pages += len(present)
        else:
            count = self.core.pin(self.namespace.number, present, self.until)
            self.pages += count
            self.refused += len(present) - count
        return bool(self.left)

    @property
    def done(self) -> bool:
        return not self.left

    def report(self) -> dict[str, object]:
        return {"pages": self.pages, "refused": self.refused, "pinned": len(self.namespace.pins.pinned)}
