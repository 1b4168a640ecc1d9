"""ARC and S3-FIFO: new pages and proven ones on a side each, so that what is seen once does not drive out the rest.

A side is a queue of pages beside a place for those that cannot leave yet, because others hang on them.  Without it a
policy with several queues would meet the same prefix again and again while its suffixes stand in another queue.  What
always holds: ``place`` of a page is the queue of its side that it is in; at most as many keys of pages that left are
remembered as the capacity holds pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from ems.pool.pages import Page
from ems.pool.policy.queue import PageQueue

SMALL_SHARE = 0.1
"""Share of the capacity that the small queue may fill before pages leave it."""
MOST_USES = 3
"""Uses that count; so many rounds a page can stay in the main queue without another."""


class Side:
    """Pages from the oldest to the newest, and those set aside."""

    def __init__(self) -> None:
        self.queue = PageQueue()
        self.aside = PageQueue()

    def __len__(self) -> int:
        return self.queue.count + self.aside.count

    def holds(self, page: Page) -> bool:
        return page.place is self.queue or page.place is self.aside

    def put(self, page: Page) -> None:
        """Put a page that is nowhere in as the newest."""
        page.place = self.queue
        self.queue.add(page)

    def spare(self, page: Page) -> None:
        """Set a page of this side aside."""
        page.place.remove(page)
        page.place = self.aside
        self.aside.add(page)

    def put_back(self, page: Page) -> None:
        """Make a page of this side the newest, if it was set aside and nothing hangs on it."""
        if page.place is self.aside and page.suffixes is None:
            self.aside.remove(page)
            self.put(page)

    def ready(self, page: Page) -> None:
        """Make a page of this side the oldest, if it was set aside."""
        if page.place is self.aside:
            self.aside.remove(page)
            page.place = self.queue
            self.queue.add_oldest(page)


class TwoSides:
    """What policies have in common that keep new pages and proven ones on a side each."""

    def __init__(self) -> None:
        self._new, self._proven = Side(), Side()
        self._capacity = 0
        self._spared: list[Page] = []
        """Set aside though nothing hangs on them: leased, pinned or awaited when they were met."""

    def spare(self, page: Page) -> None:
        """Aside: until nothing hangs on it, or, if nothing does, until pages come in or no other is left.

        As the newest of its side it would be met again before all of the other side.
        """
        self._side(page).spare(page)
        if page.suffixes is None:
            self._spared.append(page)

    def _return_spared(self) -> None:
        spared, self._spared = self._spared, []
        for page in spared:
            self._side(page).put_back(page)

    def ready(self, page: Page) -> None:
        self._side(page).ready(page)

    def _side(self, page: Page) -> Side:
        return self._proven if self._proven.holds(page) else self._new

    def __iter__(self) -> Iterator[Page]:
        return chain(self._new.queue, self._proven.queue, self._new.aside, self._proven.aside)

    def __len__(self) -> int:
        return len(self._new) + len(self._proven)


class Ghosts:
    """A bounded set of keys in the order in which they came."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def take(self, key: bytes) -> bool:
        known = key in self._keys
        self._keys.pop(key, None)
        return known

    def shrink(self, count: int) -> None:
        while len(self._keys) > max(count, 0):
            self._keys.popitem(last=False)


class Arc(TwoSides):
    """Two sides with a memory each, and a balance between the two that learns.

    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).  A key that comes back
    while it is remembered says which of the sides was too short.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_once, self._left_again = Ghosts(), Ghosts()
        self._target = 0.0
        """Pages that the first side should have."""

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = min(self._target, float(capacity))
        self._forget()

    def add(self, pages: list[Page]) -> None:
        self._return_spared()
        for page in reversed(pages):
            once, again = len(self._left_once), len(self._left_again)
            if self._left_once.take(page.key):
                self._target = min(self._target + max(1.0, again / max(once, 1)), float(self._capacity))
                self._proven.put(page)
            elif self._left_again.take(page.key):
                self._target = max(self._target - max(1.0, once / max(again, 1)), 0.0)
                self._proven.put(page)
            else:
                self._new.put(page)

    def use(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            page.place.remove(page)
            self._proven.put(page)

    def refresh(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            side = self._side(page)
            page.place.remove(page)
            side.put(page)

    def remove(self, page: Page) -> None:
        once = self._new.holds(page)
        page.place.remove(page)
        page.place = None
        (self._left_once if once else self._left_again).add(page.key)
        self._forget()

    def _forget(self) -> None:
        self._left_once.shrink(self._capacity - len(self._new))
        self._left_again.shrink(self._capacity - len(self._left_once))

    def first(self) -> Page | None:
        """The oldest of the side that is longer than it should be."""
        if not (self._new.queue.count or self._proven.queue.count):
            self._return_spared()
        short, long = (self._proven, self._new) if len(self._new) > self._target else (self._new, self._proven)
        return long.queue.oldest or short.queue.oldest


class S3Fifo(TwoSides):
    """A small queue on probation, a main queue, and a memory of what left the small one.

    After Yang and others, "FIFO queues are all you need for cache eviction" (SOSP 2023).  A page that is used only
    while it is new never enters the main queue.  ``uses`` of a page counts since it came or was looked at last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = Ghosts()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._left.shrink(capacity)

    def add(self, pages: list[Page]) -> None:
        self._return_spared()
        for page in reversed(pages):
            page.uses = 0
            (self._proven if self._left.take(page.key) else self._new).put(page)

    def use(self, pages: list[Page]) -> None:
        for page in pages:
            if page.uses < MOST_USES:
                page.uses += 1

    def refresh(self, pages: list[Page]) -> None:
        """No use of a page by itself."""

    def remove(self, page: Page) -> None:
        probation = self._new.holds(page)
        page.place.remove(page)
        page.place = None
        if probation:
            self._left.add(page.key)
            self._left.shrink(self._capacity)

    def first(self) -> Page | None:
        """The oldest that was not used; those that were go on into, or around in, the main queue."""
        if not (self._new.queue.count or self._proven.queue.count):
            self._return_spared()
        while True:
            small, main = self._new.queue.oldest, self._proven.queue.oldest
            on_probation = len(self._new) > SMALL_SHARE * self._capacity
            page = (small or main) if on_probation else (main or small)
            if page is None or not page.uses:
                return page
            page.uses = page.uses - 1 if page is main else 0
            page.place.remove(page)
            self._proven.put(page)
