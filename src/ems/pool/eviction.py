"""Which pages leave when room is needed.

Least recently used first, with three promises: a leased page stays, a page stays while it is the prefix of
another, and a page that stays is set behind all others, so that no pass looks at it again soon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ems.pool.layout import refs_begin

if TYPE_CHECKING:
    from ems.pool.index import Index, Page

PATIENCE = 4096
"""Pages that one pass may find unwilling to leave before it gives up; the next pass begins behind them."""


def evict(index: Index, count: int, free: Callable[[Page], None]) -> int:
    """Discard up to ``count`` pages of ``index``, oldest first, and call ``free`` with each.

    Returns how many left; fewer than asked when the rest is leased or holds leased suffixes, or when too many
    in a row were.
    """
    evicted = 0
    patience = min(index.recency.count, count + PATIENCE)
    while evicted < count and patience > 0:
        patience -= 1
        page = index.recency.oldest
        if page is None:
            break
        if page.leases or page.suffixes is not None:
            index.recency.touch(page)
            continue
        index.discard(page)
        free(page)
        evicted += 1
    return evicted


def oldest_segment(index: Index, held: Iterable[Page], occupied: Collection[int]) -> int | None:
    """The segment that was not used for longest among those that can be emptied; None when there is none.

    A segment cannot be emptied when it is among ``occupied``, or when a page of it or a suffix of one is among
    ``held``, the pages of ``index`` that are leased or being written.
    """
    blocked, seen = set(occupied), set()
    for page in held:
        above: Page | None = page
        while above is not None and above not in seen:
            seen.add(above)
            if above.ref:
                blocked.add(above.segment)
            above = above.parent
    for page in index.recency:
        if page.segment not in blocked:
            return page.segment
    return None


def evict_segment(index: Index, segment: int, free: Callable[[Page], None]) -> int:
    """Discard every page of ``segment`` with all that hangs on it, and call ``free`` with each.

    Nothing of that may be leased or being written (see :func:`oldest_segment`).  Returns how many pages left.
    """
    beginning = refs_begin(segment)
    doomed: dict[Page, None] = {}
    for page in index:
        if page.ref.startswith(beginning) and page not in doomed:
            _doom(page, doomed)
    evicted = 0
    for page in doomed:
        if page.ref:  # else it was missing already
            index.discard(page)
            free(page)
            evicted += 1
    return evicted


def _doom(page: Page, doomed: dict[Page, None]) -> None:
    """Add ``page`` and all that hangs on it to ``doomed``, suffixes before their prefixes."""
    path = [(page, iter(page.children()))]
    while path:
        page, suffixes = path[-1]
        following = next((one for one in suffixes if one not in doomed), None)
        if following is not None:
            path.append((following, iter(following.children())))
        else:
            doomed[page] = None
            path.pop()
