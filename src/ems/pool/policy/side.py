"""A queue of pages beside a place for those that cannot leave yet, because others hang on them.

Without it a policy with several queues would meet the same prefix again and again while its suffixes stand in another
queue.  What always holds: ``place`` of a page is the queue of its side that it is in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ems.pool.policy.queue import PageQueue

if TYPE_CHECKING:
    from ems.pool.pages import Page


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
        """Set a page of this side aside until nothing hangs on it, or, if nothing does, make it the newest."""
        page.place.remove(page)
        if page.suffixes is None:
            self.put(page)
        else:
            page.place = self.aside
            self.aside.add(page)

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

    def spare(self, page: Page) -> None:
        self._side(page).spare(page)

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
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def shrink(self, count: int) -> None:
        while len(self._keys) > max(count, 0):
            self._keys.popitem(last=False)
