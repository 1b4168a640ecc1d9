"""Least recently used first: what most caches do, and what others are measured by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ems.pool.policy.queue import PageQueue

if TYPE_CHECKING:
    from ems.pool.pages import Page


class Lru:
    """One queue; whatever is touched goes to its end."""

    def __init__(self) -> None:
        self._queue = PageQueue()

    def resize(self, capacity: int) -> None:
        """Capacity means nothing to it."""

    def add(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            self._queue.add(page)

    def use(self, pages: list[Page]) -> None:
        self._queue.touch_all(pages)

    refresh = use

    def spare(self, page: Page) -> None:
        self._queue.touch(page)

    def ready(self, page: Page) -> None:
        """It stands where it stood."""

    def remove(self, page: Page) -> None:
        self._queue.remove(page)

    def first(self) -> Page | None:
        return self._queue.oldest

    def __iter__(self) -> Iterator[Page]:
        return iter(self._queue)

    def __len__(self) -> int:
        return self._queue.count
