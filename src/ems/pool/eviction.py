"""Which pages leave when room is needed.

Least recently used first, with three promises: a leased page stays, a page stays while it is the prefix of
another, and a page that stays is set behind all others, so that one pass costs no more than it frees.
"""

from __future__ import annotations

from collections.abc import Callable

from ems.pool.index import Index, Page


def evict(index: Index, count: int, free: Callable[[Page], None]) -> int:
    """Discard up to ``count`` pages of ``index``, oldest first, and call ``free`` with each.

    Returns how many left; fewer than asked when the rest is leased or holds leased suffixes.
    """
    evicted = 0
    patience = index.recency.count
    while evicted < count and patience > 0:
        patience -= 1
        page = index.recency.oldest
        if page is None:
            break
        if page.leases or page.children:
            index.recency.touch(page)
            continue
        index.discard(page)
        free(page)
        evicted += 1
    return evicted


def evict_segment(index: Index, segment: int, free: Callable[[Page], None]) -> bool:
    """Discard every page of ``segment`` with all that hangs on it; all or nothing.

    Returns False, with nothing discarded, when one of those pages is leased or being written.
    """
    doomed = {id(page): page for page in index if page.segment == segment}
    grown = True
    while grown:
        grown = False
        for page in index:
            if page.parent is not None and id(page.parent) in doomed and id(page) not in doomed:
                doomed[id(page)] = page
                grown = True
    if any(page.leases or not page.present for page in doomed.values()):
        return False
    remaining = list(doomed.values())
    while remaining:
        leaves = [page for page in remaining if not page.children]
        for page in leaves:
            index.discard(page)
            free(page)
        remaining = [page for page in remaining if page.present]
    return True
