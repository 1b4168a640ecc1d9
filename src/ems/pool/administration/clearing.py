"""Takes pages out of memory first and of the tiers below it then, so that what was cleared does not come up again.

A brain.  What always holds: nothing of what is cleared whole goes up or down meanwhile; what memory has when it was
cleared (because it is pinned, young, being read or new) stays in the tiers too; a tier that does not work costs its own
pages a sentence, and nobody waits for it; each pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from ems.pool.administration.passes import PATIENCE, Clearing
from ems.pool.tiers.seam import Forgotten, Holding, Meant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ems.pool.core.index import Page
    from ems.pool.core.namespaces import NamespacePages

STEP = 2048
"""Pages whose keys are noted in one step; less than a millisecond's work."""
MAX_NAMED = 32
"""Namespaces that are named which a tier still has; more are only counted."""


class Errand(Protocol):
    """Something that a tier was asked to do."""

    def outcome(self) -> Forgotten | str | None:
        """What it did, or why it did not do it; None while it is under way."""


class Clearable(Protocol):
    """What clearing needs of the tiers, which have numbers."""

    def holdings(self) -> list[tuple[str, dict[str, Holding]]]:
        """The name of each tier, and what it has of each namespace."""

    def hold_back(self, meant: Callable[[str], bool]) -> Callable[[], None]:
        """Nothing of the namespaces that are ``meant`` goes up or down, until what is returned is called."""

    def take_back(self, namespace: int, wanted: Callable[[Page], bool]) -> list[bytes]:
        """Let go of what waits to be written or fetched of ``namespace``; returns the keys that are being fetched."""

    def offer(self, namespace: int, pages: list[Page]) -> None:
        """Have ``pages`` written, which were stored while nothing went down."""

    def look(self, tier: int) -> Errand:
        """Have ``tier`` see what is there; with ``more`` it has not seen all yet."""

    def forget(self, tier: int, meant: Meant, *, dry_run: bool) -> Errand:
        """Have ``tier`` take out a portion of what is ``meant``, or count it."""

    def settle(self, tier: int) -> None:
        """What was done to ``tier`` is to be written down soon."""


class _OneTier:
    """How far one tier is."""

    def __init__(self, number: int, name: str, errand: Errand | None) -> None:
        self.number = number
        self.name = name
        self.errand = errand
        self.left: list[str] | None = None
        """Namespaces to be cleared, the next one last; None before it has seen what is there."""
        self.meant: Meant | None = None
        self.sparing: Iterator[Page] | None = None
        """What memory has of the next namespace, as far as it was not looked at."""
        self.spared: set[bytes] = set()
        self.pages = 0
        self.bytes = 0
        self.reason = ""
        self.remaining: list[str] = []

    @property
    def done(self) -> bool:
        return bool(self.reason) or self.left == []

    def report(self) -> dict[str, object]:
        named = {"remaining": self.remaining[:MAX_NAMED], "namespaces_remaining": len(self.remaining)}
        return {"name": self.name, "pages": self.pages, "bytes": self.bytes, "reason": self.reason, **named}


class DeepClearing:
    """Clears what ``meant`` says of the namespaces in ``spaces``, which grows, and of those that only ``tiers`` know.

    ``wanted`` says which pages in memory are meant, ``unused_for`` is the age in seconds that is meant (0: any).
    """

    def __init__(
        self,
        memory: Clearing,
        spaces: Sequence[NamespacePages],
        tiers: Clearable,
        meant: Callable[[str], bool],
        wanted: Callable[[NamespacePages, Page], bool],
        unused_for: float,
        now: float,
        *,
        dry_run: bool,
    ) -> None:
        self._memory = memory
        self._spaces = spaces
        self._tiers = tiers
        self._meant = meant
        self._wanted = wanted
        self._unused_for = unused_for
        self._dry_run = dry_run
        self._until = now + PATIENCE
        self._let_in: Callable[[], None] | None = None
        self._coming: list[tuple[NamespacePages, bytes]] = []
        self._new: list[tuple[NamespacePages, Iterator[Page]]] = []
        """What is offered to the tiers at the end."""
        if not dry_run:
            self._close_doors()
        self._below = [_OneTier(at, name, None) for at, (name, _) in enumerate(tiers.holdings())]

    def _close_doors(self) -> None:
        for space in self._spaces:
            if self._meant(space.name):
                keys = self._tiers.take_back(space.number, partial(self._wanted, space))
                self._coming += [(space, key) for key in keys]
        if not self._unused_for:
            # With an age nothing is held back: what is fetched now is not old any more.
            self._let_in = self._tiers.hold_back(self._meant)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be done."""
        return self._memory.done and all(one.done for one in self._below) and self._let_in is None and not self._new

    def step(self, now: float) -> bool:
        """Go on; whether there is something to be done right away."""
        # First: what is being fetched hangs on pages for which memory waits.
        if self._coming:
            self._look_what_came()
        if not self._memory.done:
            return self._memory.step(now)
        if self._coming and now < self._until:
            return False
        if at_work := [one for one in self._below if not one.done]:
            return sum(self._go_on(one) for one in at_work) > 0
        return self._open_doors()

    def _look_what_came(self) -> None:
        """What was being fetched when this began is cleared once it is there."""
        waiting = []
        for space, key in self._coming:
            page = space.index.get(key)
            if page is not None and page.present:
                self._memory.also(space, page)
            elif page is not None:
                waiting.append((space, key))
        self._coming = waiting

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
                one.left.pop()
                one.meant = None
        if one.done:
            self._tiers.settle(one.number)
        return True

    def _ask(self, one: _OneTier) -> bool:
        if one.left is None:
            one.errand = self._tiers.look(one.number)
        elif one.meant is not None or self._spare(one, one.left[-1]):
            one.meant = one.meant or Meant(one.left[-1], self._unused_for, frozenset(one.spared))
            one.sparing = None
            one.errand = self._tiers.forget(one.number, one.meant, dry_run=self._dry_run)
        return True

    def _names_in(self, one: _OneTier) -> list[str]:
        return [name for name in self._tiers.holdings()[one.number][1] if self._meant(name)]

    def _give_up(self, one: _OneTier, reason: str) -> None:
        one.reason = reason
        one.remaining = sorted(set(self._names_in(one)).union(one.left or ()))

    def _spare(self, one: _OneTier, name: str) -> bool:
        """Note what memory still has of the namespace ``name``; whether all of it was noted."""
        space = next((space for space in self._spaces if space.name == name), None)
        if one.sparing is None:
            one.sparing = iter([] if space is None else list(space.index))
            one.spared.clear()
        looked = list(islice(one.sparing, STEP))
        if space is not None:
            one.spared.update(page.key for page in looked if self._stays(space, page))
        return len(looked) < STEP

    def _stays(self, space: NamespacePages, page: Page) -> bool:
        return not self._wanted(space, page) if self._dry_run else space.index.get(page.key) is page

    def _open_doors(self) -> bool:
        """Let pages move again, and offer what memory has of what was cleared: it could not be written meanwhile."""
        if self._let_in is not None:
            self._let_in()
            self._let_in = None
            self._new = [(space, iter(list(space.index))) for space in self._spaces if self._meant(space.name)]
        if self._new:
            space, pages = self._new[-1]
            looked = list(islice(pages, STEP))
            self._tiers.offer(
                space.number, [page for page in looked if space.index.get(page.key) is page and page.present]
            )
            if len(looked) < STEP:
                self._new.pop()
        return bool(self._new)

    def report(self) -> dict[str, Any]:
        """How far it is."""
        return {**self._memory.report(), "tiers": [one.report() for one in self._below]}
