"""ARC: pages seen once and pages seen again on a side each, and a balance between the two that learns.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).  A key that comes back while
it is remembered says which of the sides was too short.  What always holds: the target of the first side lies between 0
and the capacity; at most as many keys are remembered as the capacity holds pages; a page on which others hang is set
aside when it is met, and comes back as the first of its side when the last of them left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.pool.policy.side import Ghosts, TwoSides

if TYPE_CHECKING:
    from ems.pool.pages import Page


class Arc(TwoSides):
    """Two sides with a memory each."""

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
        if all(page.place is self._proven.queue for page in pages):
            self._proven.queue.touch_all(pages)
            return
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
        short, long = (self._proven, self._new) if len(self._new) > self._target else (self._new, self._proven)
        return long.queue.oldest or short.queue.oldest
