"""A queue of pages, of which policies are made, and LRU, which is one such queue.

It is linked through the pages themselves: no memory of its own, every step O(1).  What always holds: a page is in one
queue at most.
"""

from __future__ import annotations

from collections.abc import Iterator

from ems.pool.pages import Page


class PageQueue:
    """Pages from the oldest to the newest."""

    __slots__ = ("_newest", "count", "oldest")

    def __init__(self) -> None:
        self.oldest: Page | None = None
        """The page that was put in, or brought to the newest end, before all others."""
        self._newest: Page | None = None
        self.count = 0

    def __iter__(self) -> Iterator[Page]:
        page = self.oldest
        while page is not None:
            following = page.newer
            yield page
            page = following

    def add(self, page: Page) -> None:
        """Put a page that is in no queue at the newest end."""
        self.put(page, page, 1)

    def add_oldest(self, page: Page) -> None:
        """Put a page that is in no queue at the oldest end."""
        page.newer = self.oldest
        page.older = None
        if self.oldest is None:
            self._newest = page
        else:
            self.oldest.older = page
        self.oldest = page
        self.count += 1

    def remove(self, page: Page) -> None:
        self.take(page, page, 1)

    def touch(self, page: Page) -> None:
        """Bring a page of the queue to the newest end."""
        if page is not self._newest:
            self.remove(page)
            self.add(page)

    def take(self, newest: Page, oldest: Page, count: int) -> None:
        """Take out the ``count`` neighbours from ``oldest`` to ``newest``, which stay linked to each other."""
        before, after = oldest.older, newest.newer
        if after is None:
            self._newest = before
        else:
            after.older = before
        if before is None:
            self.oldest = after
        else:
            before.newer = after
        oldest.older = newest.newer = None
        self.count -= count

    def put(self, newest: Page, oldest: Page, count: int) -> None:
        """Put ``count`` pages that are linked to each other, and in no queue, at the newest end."""
        oldest.older = self._newest
        newest.newer = None
        if self._newest is None:
            self.oldest = oldest
        else:
            self._newest.newer = oldest
        self._newest = newest
        self.count += count


class Lru:
    """Least recently used first: what most caches do, and what others are measured by."""

    def __init__(self) -> None:
        self._queue = PageQueue()

    def resize(self, capacity: int) -> None:
        """Capacity means nothing to it."""

    def add(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            self._queue.add(page)

    def use(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            self._queue.touch(page)

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
