"""Which pages a tier is offered before they leave memory: all that would leave soon, a few at a time, over and over.

A brain.  Looking only at whoever is first would not do: those stay first while the tier has them already, and one pass
of eviction takes thousands that stood behind.  What always holds: while an order stands, every page of it comes before
any comes twice; what the tier would not take does not come again; each call costs what it may look at, and one walk in
so many the length of the order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ems.pool.pages import Page

MOST_REFUSED = 65_536
"""Refusals that are remembered; when more come, the oldest are tried again."""


class PreEvictionWalk:
    """The walks of one tier through the namespaces of a node."""

    def __init__(self) -> None:
        self._walks: dict[int, deque[Page]] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        """Where the pages lie that the tier would not take; another page of that key lies elsewhere."""

    def next(self, namespace: int, order: Iterable[Page], most: int) -> list[Page]:
        """Look at the next ``most`` pages and return those to be offered, some of which may have left meanwhile.

        ``order`` are the pages that would leave soon, the first first; it is read only when a walk begins anew.
        """
        walk = self._walks.get(namespace)
        if not walk:
            walk = self._walks[namespace] = deque(order)
        looked = [walk.popleft() for _ in range(min(most, len(walk)))]
        return [page for page in looked if page.present and page.ref not in self._refused]

    def refused(self, refs: Iterable[bytes]) -> None:
        """The tier would not take the pages that lie at ``refs``."""
        self._refused.update(dict.fromkeys(refs))
        while len(self._refused) > MOST_REFUSED:
            self._refused.popitem(last=False)
