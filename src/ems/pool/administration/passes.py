"""Work of an administrator that is too long for one go: done in steps, between which clients are served.

Brains.  What always holds: a step looks at a bounded number of pages; a page that somebody reads, or that others which
stay hang on, stays until that is over; each pass ends, because it looks at what was there when it began, and waits for
readers a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ems.pool.core.index import Page
from ems.pool.core.namespaces import NamespacePages
from ems.pool.reasons.words import Reason

STEP = 256
"""Pages that one step looks at, well below a millisecond's work."""
PATIENCE = 30.0
"""Seconds that a pass waits for readers of pages that are to leave."""
RETRY_SECONDS = 0.05
"""Time between two looks at pages that could not leave."""


class Pages(Protocol):
    """What a pass needs of the pool."""

    def take_out(self, namespace: NamespacePages, page: Page, reason: Reason) -> None:
        """Let a page leave that nobody reads and nothing hangs on."""

    def doom(self, page: Page) -> None:
        """From now on ``page`` is not found any more, though it is still being read."""

    def pardon(self, page: Page) -> None:
        """``page`` may be found again."""


class Clearing:
    """Takes out the pages of ``namespaces`` that ``wanted`` accepts; with ``dry_run`` it only counts them."""

    def __init__(
        self,
        pages: Pages,
        namespaces: Sequence[NamespacePages],
        wanted: Callable[[NamespacePages, Page], bool],
        now: float,
        *,
        dry_run: bool,
    ) -> None:
        self._pages = pages
        self._wanted = wanted
        self._dry_run = dry_run
        self._give_up_at = now + PATIENCE
        self._look_again_at = now
        # What is stored last hangs on what was stored first, mostly, so most pages can leave when they are looked at.
        self._left = [(namespace, list(namespace.index)) for namespace in namespaces]
        self._later: list[tuple[NamespacePages, Page]] = []
        self._progress = False
        self.total = sum(len(pages) for _, pages in self._left)
        self.looked_at = 0
        self.matched = 0
        self.removed = 0
        self.bytes = 0

    def step(self, now: float) -> bool:
        """Go on; whether there is something to be done right away."""
        budget = STEP
        while self._left and budget:
            namespace, pages = self._left[-1]
            while pages and budget:
                budget -= 1
                self._look(namespace, pages.pop())
            if not pages:
                self._left.pop()
        if not self._left and self._later and budget and now >= self._look_again_at:
            self._again(budget, now)
        if self._later and now >= self._give_up_at:
            for _, page in self._later:
                self._pages.pardon(page)
            self._later.clear()
        return bool(self._left) or bool(self._later and now >= self._look_again_at)

    def also(self, namespace: NamespacePages, page: Page) -> None:
        """``page`` came since, and is meant as well."""
        self._left.append((namespace, [page]))
        self.total += 1

    @property
    def done(self) -> bool:
        """Whether nothing is left to be done."""
        return not self._left and not self._later

    def _look(self, namespace: NamespacePages, page: Page) -> None:
        self.looked_at += 1
        if not _here(namespace, page) or not self._wanted(namespace, page):
            return
        self.matched += 1
        self.bytes += namespace.page_size
        if not self._dry_run:
            self._remove(namespace, page)

    def _remove(self, namespace: NamespacePages, page: Page) -> None:
        if page.leases or page.suffixes is not None:
            self._pages.doom(page)
            self._later.append((namespace, page))
        else:
            self._pages.take_out(namespace, page, Reason.CLEARED)
            self.removed += 1
            self._progress = True

    def _again(self, budget: int, now: float) -> None:
        """Look once more at pages that could not leave."""
        again, self._later = self._later[:budget], self._later[budget:]
        kept: list[tuple[NamespacePages, Page]] = []
        for namespace, page in again:
            if not _here(namespace, page):
                self._pages.pardon(page)
                self.removed += 1
            elif not self._wanted(namespace, page):  # it was pinned meanwhile
                self._pages.pardon(page)
            elif page.leases or page.suffixes is not None:
                kept.append((namespace, page))
            else:
                self._pages.take_out(namespace, page, Reason.CLEARED)
                self.removed += 1
                self._progress = True
        self._later += kept
        if not self._progress:
            self._look_again_at = now + RETRY_SECONDS
        self._progress = False

    def report(self) -> dict[str, object]:
        """How far it is."""
        return {
            "pages": self.total,
            "looked_at": self.looked_at,
            "matched": self.matched,
            "bytes": self.bytes,
            "removed": self.removed,
            "kept": self.matched - self.removed if not self._dry_run else 0,
        }


def _here(namespace: NamespacePages, page: Page) -> bool:
    return page.present and namespace.index.get(page.key) is page
