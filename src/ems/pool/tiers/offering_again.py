"""Offers what is hot to a cluster once more: when it lost what this host lent, is back, or the host leaves it.

It runs on the node's loop, a bounded number of pages at a time.  What always holds: no more is offered than the host
lends, and than the tier's queue has room for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import cast

from ems.pool.core.pool_core import PoolCore
from ems.pool.movement.hottest import HottestPages
from ems.pool.pages import Page
from ems.pool.tiers.seam import AskedTier
from ems.pool.tiers.tier_state import TierState

OFFERED = 256
"""Pages that are offered in one go."""
RANKED = 4096
"""Pages that are looked at in one go for what is hottest."""
GONE_PROBES = 3
"""Probes that failed: nobody waits for a cluster any longer, which is some ten seconds."""
WRITTEN = frozenset({"on_save", "on_second_use", "on_evict"})

Offer = Callable[[TierState, int, Sequence[Page]], None]


class OfferingAgain:
    """Of the cluster ``state``; ``offer`` has pages of a namespace written to it."""

    def __init__(self, state: TierState, core: PoolCore, offer: Offer) -> None:
        self._state = state
        self._tier = cast("AskedTier", state.tier)
        self._core = core
        self._offer = offer
        self._offered_after = (0, 0)
        """How often the cluster had lost what it was lent, and was cut out, when this was done last."""
        self._hottest: HottestPages | None = None
        """What is being offered."""

    def step(self) -> None:
        state, tier, core = self._state, self._tier, self._core
        if tier.leaving != core.draining:
            tier.leaving = core.draining
            state.look_soon()
        when = WRITTEN if core.draining else {"on_save", "on_second_use"}
        if state.config.write not in when:
            return
        if state.writing.open and self._offered_after != (now := (tier.losses, state.writing.cuts)):
            self._offered_after = now
            spaces = [(ns.number, ns.page_size, ns.index) for ns in core.namespaces]
            self._hottest = HottestPages(spaces, tier.lends)
        if self._hottest is None or not state.writing.open or self._hottest.step(RANKED):
            return
        for namespace, page in self._taken(self._hottest):
            if core.page(namespace, page.key) is page:
                self._offer(state, namespace, state.due([page], *when))
        if not self._hottest:
            self._hottest = None

    def _taken(self, hottest: HottestPages) -> list[tuple[int, Page]]:
        """What is offered now: half of the queue is left to what is saved meanwhile, where a page is not larger.

        One that the queue never has room for is offered alone, and dropped there: what comes after it does not wait.
        """
        queue = self._state.write_back
        half = (queue.free + queue.size) // 2
        taken = hottest.take(OFFERED, min(half - queue.size, queue.free))
        return taken if taken or queue.size else hottest.take(1, sys.maxsize)

    @property
    def waiting(self) -> int:
        """How many pages wait to be given to other hosts before this one may go."""
        state, tier = self._state, self._tier
        if state.config.write not in WRITTEN:
            return 0
        if not state.writing.open:  # one store that failed is no reason to go; many probes that did are
            return int(bool(tier.lends) and state.writing.bad < GONE_PROBES)
        if not (tier.leaving and not tier.gives and self._offered_after == (tier.losses, state.writing.cuts)):
            return int(bool(tier.lends))  # it has not begun
        return len(self._hottest or ()) + len(state.write_back)
