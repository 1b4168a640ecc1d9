"""The default: the page leaves whose slot is expected to bring the fewest uses, as learned from this very load.

Pages fall into classes by how often they were used, also before they left and came back.  Of those used once, all that
is known is where they hang: behind a prompt that only few have used, as the next turn of a conversation does, or behind
nothing or something that everybody uses; and whether they are the end of what was stored, which the next turn rarely
repeats to the token.  :mod:`ems.pool.policy.reuse` learns how long pages of each class take to be used again, and what
keeping them is worth at each age.  So pages used once leave before proven ones where that pays, a loop longer than the
pool keeps a part of it, and where nothing is known yet the oldest leave first.

Pages of one class that were touched in the same epoch form a group.  What always holds: within a group a suffix is
older than its prefix; what a group is worth changes with the epoch only, and each group with pages that may leave is in
the heap; a page on which others hang is set aside within its group when it is met, and comes back when the last of them
left.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ems.pool.pages import Page
from ems.pool.policy.queue import PageQueue
from ems.pool.policy.reuse import (
    EPOCHS_OF_CAPACITY,
    MOST_USES,
    OLDEST,
    SPAN_OF_AGE,
    ReuseHistory,
    UseMemory,
    worth_by_age,
)

REMEMBERED = 8
"""Entries of the memory of uses for each page of the capacity."""
LEARN_EVERY = EPOCHS_OF_CAPACITY // 4
"""Epochs between two looks at the history."""
LEAST_BETWEEN = 256
"""Pages touched at least between two looks: a small pool does not look all the time."""
KEEP = 0.99
"""What an observation still counts after each look."""
REBASE = 1.5
"""Factor by which the capacity must change before the length of an epoch does; what was learned is lost then."""

BEGUN, BEGUN_END, GOES_ON, GOES_ON_END = range(4)
"""Used once: what begins a prompt or hangs on what all share, and what goes on from what few used; the ends of both."""
KINDS = 8
"""Those, and uses of 2 or 3, 4 to 7, 8 to 15, and more."""
FEW = 7
"""Uses of what is not shared by everybody."""
KIND_OF_USES = [min(uses.bit_length() + 2, KINDS - 1) for uses in range(MOST_USES + 1)]


class Group(PageQueue):
    """Pages of one class that were touched last in one epoch; with an inner one of those that others hang on."""

    __slots__ = ("epoch", "inner", "kind", "listed", "outer")

    def __init__(self, kind: int, epoch: int, outer: Group | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.epoch = epoch
        self.listed = False
        """Whether it is in the heap."""
        self.outer = outer
        self.inner: Group | None = None


def kind_of(page: Page) -> int:
    """The class of a page that has one, after it was used or something was hung on it."""
    if page.uses > 1:
        return KIND_OF_USES[page.uses]
    kind: int = page.place.kind
    return kind & ~1 if page.suffixes is not None else kind


def kind_of_new(page: Page) -> int:
    """The class of a page that came just now; what it hangs on has its class already."""
    if page.uses > 1:
        return KIND_OF_USES[page.uses]
    end = page.suffixes is None
    parent = page.parent
    if parent is None or parent.place is None:
        return BEGUN + end
    goes_on = parent.uses <= FEW if parent.uses > 1 else parent.place.kind >= GOES_ON
    return (GOES_ON if goes_on else BEGUN) + end


class Forecast:
    """Groups of pages by class and epoch, and a heap of them by worth."""

    def __init__(self) -> None:
        self._count = 0
        self._groups: list[Group] = []
        self._spared: list[Page] = []
        """Set aside though nothing hangs on them: leased, pinned or awaited when they were met."""
        self._touched = 0
        self._rebase(1)

    def _rebase(self, capacity: int) -> None:
        self._capacity = capacity
        self._epoch_pages = max(capacity // EPOCHS_OF_CAPACITY, 1)
        self._epoch_ends = self._touched + self._epoch_pages
        self._learn_at = self._touched + LEAST_BETWEEN
        self._history = ReuseHistory(KINDS, capacity)
        self._memory = UseMemory(REMEMBERED * capacity)
        self._worth: list[list[float]] = []
        self._learn()
        latest = max((group.epoch for group in self._groups), default=0)
        for group in self._groups:
            group.epoch -= latest + 1
        self._current: list[Group] = []
        self._begin_epoch()

    def resize(self, capacity: int) -> None:
        """Learn anew where the capacity changed much: times are measured in shares of it."""
        if not self._capacity / REBASE < capacity < self._capacity * REBASE:
            self._groups += self._current
            self._rebase(max(capacity, 1))

    # What happens to pages

    def add(self, pages: list[Page]) -> None:
        see, mask, recall = self._history.see, self._history.mask & 0xFF, self._memory.get
        runs: list[list[Page]] = []
        last = None
        for page in pages:  # a prefix first: what hangs on a page takes after it
            uses = recall(page.key) or page.uses
            page.uses = uses + 1 if uses < MOST_USES else MOST_USES
            group = page.place = self._current[kind_of_new(page)]
            if not page.key[-1] & mask:
                see(page.key, group.kind)
            if group is last:
                above = runs[-1][-1]
                page.newer, above.older = above, page
                runs[-1].append(page)
            else:
                runs.append([page])
                last = group
        for run in reversed(runs):
            group = run[0].place
            group.put(run[0], run[-1], len(run))
            if not group.listed:
                self._list(group)
        self._count += len(pages)
        self._pass(len(pages))

    def use(self, pages: list[Page]) -> None:
        see, mask = self._history.see, self._history.mask & 0xFF
        kinds = []
        for page in pages:
            uses = page.uses = page.uses + 1 if page.uses < MOST_USES else MOST_USES
            kinds.append(KIND_OF_USES[uses])
            if not page.key[-1] & mask:
                see(page.key, KIND_OF_USES[uses])
        self._move(pages, kinds)
        self._pass(len(pages))

    def refresh(self, pages: list[Page]) -> None:
        """Into the present epoch, without a use; an end on which something was hung is none any more."""
        self._move(pages, [kind_of(page) for page in pages])

    def _move(self, pages: list[Page], kinds: list[int]) -> None:
        """Bring pages of one prompt to the newest end of the groups of ``kinds``, runs of neighbours at once."""
        last = len(pages) - 1
        while last >= 0:
            newest = oldest = pages[last]
            source, kind, count = newest.place, kinds[last], 1
            while last >= count:
                above = pages[last - count]
                if newest.newer is not above or kinds[last - count] != kind:
                    break
                newest = above
                count += 1
            target = self._current[kind]
            if newest.newer is not None or source is not target:
                source.take(newest, oldest, count)
                target.put(newest, oldest, count)
                if source is not target:
                    for page in pages[last - count + 1 : last + 1]:
                        page.place = target
                if not target.listed:
                    self._list(target)
            last -= count

    def spare(self, page: Page) -> None:
        """Aside: until nothing hangs on it, or, if nothing does, until the next epoch or until no other is left."""
        group: Group = page.place
        if group.inner is None:
            group.inner = Group(group.kind, group.epoch, group)
        group.remove(page)
        group.inner.add(page)
        page.place = group.inner
        if page.suffixes is None:
            self._spared.append(page)

    def _return_spared(self) -> None:
        spared, self._spared = self._spared, []
        for page in spared:
            if page.place is not None and page.suffixes is None:
                self.ready(page)

    def ready(self, page: Page) -> None:
        aside: Group = page.place
        group = aside.outer
        if group is None:
            return
        aside.remove(page)
        group.add_oldest(page)
        page.place = group
        if not group.listed:
            self._list(group)

    def remove(self, page: Page) -> None:
        page.place.remove(page)
        page.place = None
        self._memory.put(page.key, page.uses)
        self._count -= 1

    # Time and order

    def _pass(self, pages: int) -> None:
        """``pages`` were touched: that is what time is measured in."""
        self._touched += pages
        if self._touched < self._epoch_ends:
            return
        while self._touched >= self._epoch_ends:
            self._epoch_ends += self._epoch_pages
            self._history.next_epoch()
        if self._touched >= self._learn_at:
            self._learn_at = self._touched + max(LEAST_BETWEEN, LEARN_EVERY * self._epoch_pages)
            self._learn()
            self._history.fade(KEEP)
        self._groups += self._current
        self._begin_epoch()

    def _learn(self) -> None:
        self._worth = worth_by_age(self._history.again, self._history.reached).tolist()

    def _begin_epoch(self) -> None:
        self._current = [Group(kind, self._history.epoch) for kind in range(KINDS)]
        self._groups = [group for group in self._groups if group.count or (group.inner and group.inner.count)]
        self._heap: list[tuple[float, int, int, Group]] = []
        for group in self._groups:
            group.listed = group.count > 0
            if group.listed:
                self._heap.append(self._ranked(group))
        heapify(self._heap)
        self._return_spared()

    def _list(self, group: Group) -> None:
        group.listed = True
        heappush(self._heap, self._ranked(group))

    def _ranked(self, group: Group) -> tuple[float, int, int, Group]:
        """Of two groups that are worth the same the older comes first."""
        age = min(self._history.epoch - group.epoch, OLDEST)
        return self._worth[group.kind][SPAN_OF_AGE[age]], group.epoch, group.kind, group

    def first(self) -> Page | None:
        """The oldest page of the group of least worth."""
        page = self._top()
        if page is None and self._spared:
            self._return_spared()
            page = self._top()
        return page

    def _top(self) -> Page | None:
        heap = self._heap
        while heap:
            group = heap[0][-1]
            page = group.oldest
            if page is not None:
                return page
            group.listed = False
            heappop(heap)
        return None

    def __iter__(self) -> Iterator[Page]:
        for *_, group in sorted(self._ranked(group) for group in [*self._groups, *self._current]):
            yield from group
            if group.inner is not None:
                yield from group.inner

    def __len__(self) -> int:
        return self._count
