"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.

After Yang and others, "FIFO queues are all you need for cache eviction" (SOSP 2023).  A page that is used only while it
is new never enters the main queue.  What always holds: at most as many keys are remembered as the capacity holds pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ems.pool.policy.side import Ghosts, Side

if TYPE_CHECKING:
    from ems.pool.pages import Page

SMALL_SHARE = 0.1
"""Share of the capacity that the small queue may fill before pages leave it."""
MOST_USES = 3
"""Uses that count; so many rounds a page can stay in the main queue without another."""


class S3Fifo:
    """Two queues in the order of arrival; ``uses`` of a page counts since it came or was looked at last."""

    def __init__(self) -> None:
        self._small, self._main = Side(), Side()
        self._left = Ghosts()
        self._capacity = 0

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._left.shrink(capacity)

    def add(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            page.uses = 0
            (self._main if self._left.take(page.key) else self._small).put(page)

    def use(self, pages: list[Page]) -> None:
        for page in pages:
            if page.uses < MOST_USES:
                page.uses += 1

    def refresh(self, pages: list[Page]) -> None:
        """No use of a page by itself."""

    def spare(self, page: Page) -> None:
        self._side(page).spare(page)

    def ready(self, page: Page) -> None:
        self._side(page).ready(page)

    def remove(self, page: Page) -> None:
        probation = self._small.holds(page)
        page.place.remove(page)
        page.place = None
        if probation:
            self._left.add(page.key)
            self._left.shrink(self._capacity)

    def _side(self, page: Page) -> Side:
        return self._main if self._main.holds(page) else self._small

    def first(self) -> Page | None:
        """The oldest that was not used; those that were go on into, or around in, the main queue."""
        while True:
            small, main = self._small.queue.oldest, self._main.queue.oldest
            on_probation = len(self._small) > SMALL_SHARE * self._capacity
            page = (small or main) if on_probation else (main or small)
            if page is None or not page.uses:
                return page
            page.uses = page.uses - 1 if page is main else 0
            page.place.remove(page)
            self._main.put(page)

    def __iter__(self) -> Iterator[Page]:
        return chain(self._small, self._main)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
