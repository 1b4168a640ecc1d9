"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.

After Yang and others, "FIFO queues are all you need for cache eviction" (SOSP 2023).  A page that is used only while it
is new never enters the main queue.  What always holds: at most as many keys are remembered as the capacity holds pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.pool.policy.side import Ghosts, TwoSides

if TYPE_CHECKING:
    from ems.pool.pages import Page

SMALL_SHARE = 0.1
"""Share of the capacity that the small queue may fill before pages leave it."""
MOST_USES = 3
"""Uses that count; so many rounds a page can stay in the main queue without another."""


class S3Fifo(TwoSides):
    """Two queues in the order of arrival; ``uses`` of a page counts since it came or was looked at last."""

    def __init__(self) -> None:
        super().__init__()
        self._left = Ghosts()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._left.shrink(capacity)

    def add(self, pages: list[Page]) -> None:
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
        while True:
            small, main = self._new.queue.oldest, self._proven.queue.oldest
            on_probation = len(self._new) > SMALL_SHARE * self._capacity
            page = (small or main) if on_probation else (main or small)
            if page is None or not page.uses:
                return page
            page.uses = page.uses - 1 if page is main else 0
            page.place.remove(page)
            self._proven.put(page)
