"""Which pages leave when room is needed.

The policy says who is first, with four promises: a leased or pinned page stays; a page stays while it is the prefix of
another; what a waiting request needs stays while anything else can leave; and a page that stays is set behind others,
so that no pass looks at it again soon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ems.pool.core.index import Index
from ems.pool.core.pins import PinSet
from ems.pool.layout import refs_begin
from ems.pool.pages import Page

PATIENCE = 4096
"""Pages that one pass may find unwilling to leave before it gives up; the next pass begins behind them."""


def evict(index: Index, count: int, free: Callable[[Page], None], pins: PinSet) -> int:
    """Discard up to ``count`` pages of ``index``, in the policy's order, and call ``free`` with each.

    Pages that ``pins`` pins stay; awaited ones leave only where nothing else can.  Returns how many left; fewer than
    asked when the rest is leased, pinned or holds such suffixes, or when too many in a row were.
    """
    evicted = _pass(index, count, free, [pins.pinned, pins.awaited])
    if evicted < count and pins.awaited:
        evicted += _pass(index, count - evicted, free, [pins.pinned])
    return evicted


def _pass(index: Index, count: int, free: Callable[[Page], None], staying: Sequence[Collection[bytes]]) -> int:
    policy = index.policy
    staying = [keys for keys in staying if len(keys)]
    evicted = 0
    patience = min(len(policy), count + PATIENCE)
    while evicted < count and patience > 0:
        patience -= 1
        page = policy.first()
        if page is None:
            break
        if page.leases or page.suffixes is not None or (staying and any(page.key in keys for keys in staying)):
            policy.spare(page)
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
    blocked = segments_of(held).union(occupied)
    return next((page.segment for page in index.policy if page.segment not in blocked), None)


def segments_of(pages: Iterable[Page]) -> set[int]:
    """The segments of ``pages`` and of all that these hang on."""
    seen: set[Page] = set()
    for page in pages:
        above: Page | None = page
        while above is not None and above not in seen:
            seen.add(above)
            above = above.parent
    return {page.segment for page in seen if page.ref}


def evict_segment(index: Index, segment: int, free: Callable[[Page], None]) -> int:
    """Discard every page of ``segment`` with all that hangs on it, and call ``free`` with each.

    Nothing of that may be leased or being written (see :func:`oldest_segment`).  Returns how many pages left.
    """
    beginning = refs_begin(segment)
    victims: dict[Page, None] = {}
    for page in index:
        if page.ref.startswith(beginning) and page not in victims:
            add_victims(page, victims)
    evicted = 0
    for page in victims:
        if page.ref:  # else it was missing already
            index.discard(page)
            free(page)
            evicted += 1
    return evicted


def add_victims(page: Page, victims: dict[Page, None]) -> None:
    """Add ``page`` and all that hangs on it to ``victims``, suffixes before their prefixes."""
    path = [(page, iter(page.children()))]
    while path:
        page, suffixes = path[-1]
        following = next((one for one in suffixes if one not in victims), None)
        if following is not None:
            path.append((following, iter(following.children())))
        else:
            victims[page] = None
            path.pop()
