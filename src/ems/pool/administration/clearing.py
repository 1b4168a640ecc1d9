"""Takes pages out of memory first and of the tiers below it then, so that what was cleared does not come up again.

A brain.  What always holds: nothing of what is cleared whole goes up or down meanwhile; what memory has when it was
cleared (because it is pinned, young, being read or new) stays in the tiers too; a tier that does not work costs its own
pages a sentence, and nobody waits for it; each pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from ems.pool.administration.passes import Clearing
from ems.pool.tiers.answers import ForgetRequest, ForgetResult

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.pages import Page
    from ems.pool.tiers.manager import TierManager
    from ems.pool.tiers.tier_state import Errand

STEP = 2048
"""Pages whose keys are noted in one step; less than a millisecond's work."""
MAX_NAMED = 32
"""Namespaces that are named which a tier still has; more are only counted."""


class _DoesNotWork(Exception):
    """Why a tier does not do what it was asked to do."""


class _OneTier(msgspec.Struct):
    number: int
    name: str
    pages: int = 0
    bytes: int = 0
    not_understood: int = 0
    """Packs of what is cleared, which stay."""
    reason: str = ""
    remaining: list[str] = []

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
        if not dry_run:
            for ns in namespaces:
                if matches(ns.name):
                    tiers.take_back(ns.number, partial(memory.matches, ns))
            if not unused_for:
                # With an age nothing is held back: what is fetched now is not old any more.
                self._let_in = tiers.hold_back(matches)
        self._below = [_OneTier(at, name) for at, (name, _) in enumerate(tiers.holdings())]
        self._now = 0.0
        self._work = self._steps()
        self.done = False

    def step(self, now: float) -> bool:
        self._now = now
        at_once = next(self._work, None)
        self.done = at_once is None
        return bool(at_once)

    def _steps(self) -> Iterator[bool]:
        """All of the work; each step says whether the next one has something to do at once."""
        while not self._memory.done:
            yield self._memory.step(self._now)
        below = [self._clear(one) for one in self._below]
        while below:
            said = {work: next(work, None) for work in below}
            below = [work for work in below if said[work] is not None]
            yield any(one is not False for one in said.values())
        if self._let_in is not None:
            yield from self._open_doors(self._let_in)

    def _clear(self, one: _OneTier) -> Iterator[bool]:
        """The work in one tier; each step says whether something came about."""
        left: list[str] = []
        names: set[str] = set()
        try:
            # Once more: what 'ems fsck' mended meanwhile lies in another pack, and in the quarantine.
            for _ in range(1 if self._dry_run else 2):
                while (yield from _outcome(self._tiers.look(one.number))).more:
                    pass
                names.update(self._names_in(one))
                left, one.remaining, one.not_understood = sorted(names), [], 0
                while left:
                    yield from self._forget(one, left[0])
                    del left[0]
            if one.not_understood:
                one.reason = f"{one.not_understood} packs stay that this node does not understand, 'ems fsck' says why"
        except _DoesNotWork as error:
            one.reason = str(error)
            one.remaining = sorted({*self._names_in(one), *left})
        self._tiers.settle(one.number)

    def _forget(self, one: _OneTier, name: str) -> Iterator[bool]:
        spared = yield from self._spared(name)
        request = ForgetRequest(name, self._unused_for, frozenset(spared))
        more = True
        while more:
            outcome = yield from _outcome(self._tiers.forget(one.number, request, dry_run=self._dry_run))
            one.pages += outcome.pages
            one.bytes += outcome.bytes
            more = outcome.more
        one.reason = outcome.note or one.reason
        if outcome.left:
            one.not_understood += outcome.left
            one.remaining.append(name)

    def _names_in(self, one: _OneTier) -> list[str]:
        known = {*self._tiers.holdings()[one.number][1], *self._tiers.left_alone(one.number)}
        return [name for name in known if self._matches(name)]

    def _spared(self, name: str) -> Generator[bool, None, set[bytes]]:
        """The keys of what memory still has of the namespace ``name``."""
        spared: set[bytes] = set()
        for ns in self._namespaces:
            if ns.name == name:
                for looked in _some(list(ns.index)):
                    spared.update(page.key for page in looked if self._stays(ns, page))
                    yield True
        return spared

    def _stays(self, ns: NamespacePages, page: Page) -> bool:
        return not self._memory.matches(ns, page) if self._dry_run else ns.index.get(page.key) is page

    def _open_doors(self, let_in: Callable[[], None]) -> Iterator[bool]:
        """Let pages move again, and offer what memory has of what was cleared: it could not be written meanwhile."""
        let_in()
        for ns, pages in [(ns, list(ns.index)) for ns in self._namespaces if self._matches(ns.name)]:
            for looked in _some(pages):
                self._tiers.offer(
                    ns.number, [page for page in looked if ns.index.get(page.key) is page and page.present]
                )
                yield True

    def report(self) -> dict[str, Any]:
        unmatched = self._unmatched() if self.done else ""  # tiers may not have seen before what they have
        return {**self._memory.report(), "tiers": [one.report() for one in self._below], "unmatched": unmatched}


def _outcome(errand: Errand) -> Generator[bool, None, ForgetResult]:
    """What came of ``errand``.  Raises _DoesNotWork: nothing."""
    while (outcome := errand.outcome()) is None:
        yield False
    if isinstance(outcome, str):
        raise _DoesNotWork(outcome)
    return outcome


def _some(pages: Iterable[Page]) -> Iterator[list[Page]]:
    """``pages``, as many at a time as one step looks at."""
    left = iter(pages)
    while looked := list(islice(left, STEP)):
        yield looked
