"""What is offered once more to a cluster that lost what this host lent it: the pages that were used last.

A brain.  What always holds: no more is offered than the host lends, what was used last comes first; one call looks at a
bounded number of pages, some of which may have left meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from ems.pool.pages import Page

Ranked = tuple[float, int, int, int, Page]
"""Last use, a number that no other one has, namespace, size, page."""


class HottestPages:
    """The pages of ``spaces``, each a namespace, the size of its pages and these, of ``room`` bytes together."""

    def __init__(self, spaces: Sequence[tuple[int, int, Iterable[Page]]], room: int) -> None:
        self._candidates = enumerate(chain.from_iterable(_named(*space) for space in spaces))
        self._room = room
        self._heap: list[Ranked] = []
        self._ranked = False

    def step(self, most: int) -> bool:
        """Look at ``most`` more pages; False when all were looked at."""
        looked = list(islice(self._candidates, most))
        for position, (namespace, size, page) in looked:
            # Of those used together the first, which others hang on, counts as used last.
            heapq.heappush(self._heap, (page.used, -position, namespace, size, page))
            self._room -= size
            while self._room < 0:
                self._room += heapq.heappop(self._heap)[3]
        return bool(looked)

    def take(self, most: int, room: int) -> list[tuple[int, Page]]:
        """The next ``most`` pages at most, with their namespaces, that have ``room`` bytes together."""
        if not self._ranked:
            self._heap.sort()  # from now on the last one is the hottest
            self._ranked = True
        taken: list[tuple[int, Page]] = []
        while self._heap and len(taken) < most and self._heap[-1][3] <= room:
            _, _, namespace, size, page = self._heap.pop()
            room -= size
            if page.present:
                taken.append((namespace, page))
        return taken

    def __len__(self) -> int:
        return len(self._heap)


def _named(namespace: int, size: int, pages: Iterable[Page]) -> Iterable[tuple[int, int, Page]]:
    return ((namespace, size, page) for page in list(pages))
