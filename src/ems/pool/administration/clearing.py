"""Takes pages out of memory first and of the tiers below it then, so that what was cleared does not come up again.

A brain.  What always holds: nothing of what is cleared whole goes up or down meanwhile; what memory has when it was
cleared (because it is pinned, young, being read or new) stays in the tiers too; a tier that does not work costs its own
pages a sentence, and nobody waits for it; each pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ems.pool.administration.passes import Clearing
from ems.pool.tiers.answers import ForgetRequest, ForgetResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.pages import Page
    from ems.pool.tiers.manager import TierManager
    from ems.pool.tiers.tier_state import Errand

STEP = 2048
"""Pages whose keys are noted in one step; less than a millisecond's work."""
MAX_NAMED = 32
"""Namespaces that are named which a tier still has; more are only counted."""


class _OneTier:
    """How far one tier is."""

    def __init__(self, number: int, name: str, errand: Errand | None) -> None:
        self.number = number
        self.name = name
        self.errand = errand
        self.left: list[str] | None = None
        """Namespaces to be cleared, the next one last; None before it has seen what is there."""
        self.matches: ForgetRequest | None = None
        self.sparing: Iterator[Page] | None = None
        """What memory has of the next namespace, as far as it was not looked at."""
        self.spared: set[bytes] = set()
        self.pages = 0
        self.bytes = 0
        self.not_understood = 0
        """Packs of what is cleared, which stay."""
        self.reason = ""
        self.remaining: list[str] = []

    @property
    def done(self) -> bool:
        return bool(self.reason) or self.left == []

    def report(self) -> dict[str, object]:
        named = {"remaining": self.remaining[:MAX_NAMED], "namespaces_remaining": len(self.remaining)}
        return {"name": self.name, "pages": self.pages, "bytes": self.bytes, "reason": self.reason, **named}


class DeepClearing:
    """Clears what ``matches`` says of ``namespaces``, which grows, and of those that only ``tiers`` know.

    ``unused_for`` is the age in seconds that is meant (0: any); ``unmatched`` says why nothing is, as far as is known.
    """

    def __init__(
        self,
        memory: Clearing,
        namespaces: Iterable[NamespacePages],
        tiers: TierManager,
        matches: Callable[[str], bool],
        unused_for: float,
        unmatched: Callable[[], str],
        *,
        dry_run: bool,
    ) -> None:
        self._unmatched = unmatched
        self._memory = memory
        self._namespaces = namespaces
        self._tiers = tiers
        self._matches = matches
        self._unused_for = unused_for
        self._dry_run = dry_run
        self._let_in: Callable[[], None] | None = None
        self._new: list[tuple[NamespacePages, Iterator[Page]]] = []
        """What is offered to the tiers at the end."""
        if not dry_run:
            self._close_doors()
        self._below = [_OneTier(at, name, None) for at, (name, _) in enumerate(tiers.holdings())]

    def _close_doors(self) -> None:
        for ns in self._namespaces:
            if self._matches(ns.name):
                self._tiers.take_back(ns.number, partial(self._memory.matches, ns))
        if not self._unused_for:
            # With an age nothing is held back: what is fetched now is not old any more.
            self._let_in = self._tiers.hold_back(self._matches)

    @property
    def done(self) -> bool:
        return self._memory.done and all(one.done for one in self._below) and self._let_in is None and not self._new

    def step(self, now: float) -> bool:
        if not self._memory.done:
            return self._memory.step(now)
        if at_work := [one for one in self._below if not one.done]:
            return sum(self._go_on(one) for one in at_work) > 0
        return self._open_doors()

    def _go_on(self, one: _OneTier) -> bool:
        if one.errand is None:
            return self._ask(one)
        outcome = one.errand.outcome()
        if outcome is None:
            return False
        one.errand = None
        if isinstance(outcome, str):
            self._give_up(one, outcome)
        elif one.left is None:
            if not outcome.more:
                one.left = sorted(self._names_in(one), reverse=True)
        else:
            one.pages += outcome.pages
            one.bytes += outcome.bytes
            if not outcome.more:
                self._end(one, one.left.pop(), outcome)
        if one.done:
            self._tiers.settle(one.number)
        return True

    def _end(self, one: _OneTier, name: str, outcome: ForgetResult) -> None:
        """``one`` is done with the namespace ``name``."""
        one.matches = None
        if outcome.left:
            one.not_understood += outcome.left
            one.remaining.append(name)
        if not one.left and one.not_understood:
            one.reason = f"{one.not_understood} packs stay that this node does not understand, 'ems fsck' says why"

    def _ask(self, one: _OneTier) -> bool:
        if one.left is None:
            one.errand = self._tiers.look(one.number)
        elif one.matches is not None or self._spare(one, one.left[-1]):
            one.matches = one.matches or ForgetRequest(one.left[-1], self._unused_for, frozenset(one.spared))
            one.sparing = None
            one.errand = self._tiers.forget(one.number, one.matches, dry_run=self._dry_run)
        return True

    def _names_in(self, one: _OneTier) -> list[str]:
        known = {*self._tiers.holdings()[one.number][1], *self._tiers.left_alone(one.number)}
        return [name for name in known if self._matches(name)]

    def _give_up(self, one: _OneTier, reason: str) -> None:
        one.reason = reason
        one.remaining = sorted(set(self._names_in(one)).union(one.left or ()))

    def _spare(self, one: _OneTier, name: str) -> bool:
        """Note what memory still has of the namespace ``name``; whether all of it was noted."""
        ns = next((ns for ns in self._namespaces if ns.name == name), None)
        if one.sparing is None:
            one.sparing = iter([] if ns is None else list(ns.index))
            one.spared.clear()
        looked = list(islice(one.sparing, STEP))
        if ns is not None:
            one.spared.update(page.key for page in looked if self._stays(ns, page))
        return len(looked) < STEP

    def _stays(self, ns: NamespacePages, page: Page) -> bool:
        return not self._memory.matches(ns, page) if self._dry_run else ns.index.get(page.key) is page

    def _open_doors(self) -> bool:
        """Let pages move again, and offer what memory has of what was cleared: it could not be written meanwhile."""
        if self._let_in is not None:
            self._let_in()
            self._let_in = None
            self._new = [(ns, iter(list(ns.index))) for ns in self._namespaces if self._matches(ns.name)]
        if self._new:
            ns, pages = self._new[-1]
            looked = list(islice(pages, STEP))
            self._tiers.offer(ns.number, [page for page in looked if ns.index.get(page.key) is page and page.present])
            if len(looked) < STEP:
                self._new.pop()
        return bool(self._new)

    def report(self) -> dict[str, Any]:
        unmatched = self._unmatched() if self.done else ""  # tiers may not have seen before what they have
        return {**self._memory.report(), "tiers": [one.report() for one in self._below], "unmatched": unmatched}
