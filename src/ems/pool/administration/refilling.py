"""Brings whole namespaces from the tiers into memory, in steps, before anybody asks for them.

A brain.  What always holds: no page leaves memory for one that is brought; what was used last comes first, and a prefix
before its suffix; little is on its way at a time, so that what engines ask for does not wait behind it; each pass ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from ems.config import MIB
from ems.errors import EmsError
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT
from ems.pool.tiers.answers import KeyRun

if TYPE_CHECKING:
    from ems.pool.tiers.manager import TierManager

STEP = 512
"""Keys that one step looks at, about a millisecond's work."""
WINDOW = 64 * MIB
"""Bytes that are on their way at a time."""
MOST_RUNS = 64
"""Runs that are on their way at a time."""
NO_ROOM = "memory has no more room, and nothing leaves for what is only brought up"
LIMIT = "the limit is reached"


class _Space(msgspec.Struct, eq=False):
    name: str
    page_size: int
    number: int
    """-1 while it is not open."""
    pages: int = 0
    """Brought, or asked for and not yet there or lost, or counted."""
    asked: int = 0
    """Pages that are on their way."""
    in_memory: int = 0
    without_prefix: int = 0
    reason: str = ""
    """Why no more of it comes; empty when all of it did."""
    coming: set[bytes] = msgspec.field(default_factory=set)

    def report(self) -> dict[str, object]:
        return {
            "namespace": self.name,
            "pages": self.pages,
            "bytes": self.pages * self.page_size,
            "in_memory": self.in_memory,
            "without_prefix": self.without_prefix,
            "reason": self.reason,
        }


class Refilling:
    """Brings up the namespaces ``names``, at most ``limit`` bytes (0: any); with ``dry_run`` it only counts."""

    def __init__(self, core: PoolCore, tiers: TierManager, names: Sequence[str], limit: int, *, dry_run: bool) -> None:
        self._core = core
        self._tiers = tiers
        self._limit = limit
        self._dry_run = dry_run
        self._bytes = 0
        self._under_way: list[tuple[_Space, list[bytes]]] = []
        self._turns: deque[tuple[_Space, Iterator[KeyRun]]] = deque()
        """The namespaces of one tier, which take turns, because a block has pages in several."""
        self._reasons: list[dict[str, str]] = []
        self._holdings = tiers.holdings()
        self._spaces: list[_Space] = []
        for name in names:
            size = next((held[name].page_size for _, held in self._holdings if name in held), 0)
            self._spaces.append(_Space(name, size, core.find_namespace(name)))
        self._budget = 0
        self._work = self._steps()
        self.done = False

    def step(self, _now: float) -> bool:
        self._look_what_came()
        self._budget = STEP
        at_once = next(self._work, None)
        self.done = at_once is None
        return bool(at_once)

    def _steps(self) -> Iterator[bool]:
        """All of the work, the tiers from the top; each step says whether the next has something to do at once."""
        for tier, (_, held) in enumerate(self._holdings):
            here = [one for one in self._spaces if one.name in held]
            if here and not self._ends(tier):
                self._turns.extend((one, self._tiers.recent(tier, one.name)) for one in here)
                yield from self._take_turns(tier)
            while self._under_way:  # a prefix of what the next tier has may be among it
                yield False

    def _take_turns(self, tier: int) -> Iterator[bool]:
        while self._turns:
            ns, runs = self._turns.popleft()
            run = None if ns.reason else next(runs, None)  # what ended it ends it for all tiers
            if run is not None:
                self._turns.append((ns, runs))
            while run is not None:
                if self._budget <= 0:
                    yield True
                self._budget -= len(run.keys) + 1
                rest = self._bring(tier, ns, run)
                if rest is run:
                    yield False
                run = rest

    def _bring(self, tier: int, ns: _Space, run: KeyRun) -> KeyRun | None:
        """Ask for the beginning of ``run`` that memory lacks; what is left of it, all of it when that must wait."""
        here = sum(1 for _ in takewhile(lambda key: self._is_here(ns, key), run.keys))
        if here:
            ns.in_memory += here
            return KeyRun(run.keys[here - 1], run.keys[here:]) if here < len(run.keys) else None
        if run.parent != NO_PARENT and not self._is_here(ns, run.parent):
            ns.without_prefix += len(run.keys)
            return None
        keys = list(takewhile(lambda key: not self._is_here(ns, key), run.keys))
        keys = keys[: max(WINDOW // 2 // ns.page_size, 1)]
        keys = keys[: self._fitting(ns, len(keys))]
        if not keys:
            # What is on its way may have its room already, and be counted twice.
            return run if self._under_way and ns.reason == NO_ROOM else None
        if not self._dry_run and not self._ask(tier, ns, KeyRun(run.parent, keys)):
            return None if ns.reason or self._ends(tier) else run
        ns.pages += len(keys)
        self._bytes += len(keys) * ns.page_size
        ns.coming.update(keys)
        return KeyRun(keys[-1], run.keys[len(keys) :]) if len(keys) < len(run.keys) else None

    def _fitting(self, ns: _Space, count: int) -> int:
        """How many of ``count`` pages may come; when none may, ``ns`` has the reason."""
        ns.reason = ""
        if self._limit:
            count = min(count, (self._limit - self._bytes) // ns.page_size)
            if count <= 0:
                ns.reason = LIMIT
                return 0
        own, more = self._core.reclaimer.spare(
            self._core.namespaces.named(ns.name)
            or self._core.namespaces.unopened(ns.name, ns.page_size, self._core.now)
        )
        # A segment that nobody has goes to one namespace: what others asked for may need it.
        alone = all(one is ns for one, _ in self._under_way)
        count = min(count, (more if alone else own) - (ns.pages if self._dry_run else ns.asked))
        if count <= 0:
            ns.reason = NO_ROOM
        return max(count, 0)

    def _ends(self, tier: int) -> bool:
        """Whether nothing more comes from ``tier``, which is noted."""
        reason = self._tiers.why_not_read(tier)
        if reason:
            self._reasons.append({"name": self._holdings[tier][0], "reason": reason})
            self._turns.clear()
        return bool(reason)

    def _is_here(self, ns: _Space, key: bytes) -> bool:
        return key in ns.coming or (ns.number >= 0 and self._core.page(ns.number, key) is not None)

    def _ask(self, tier: int, ns: _Space, run: KeyRun) -> bool:
        if len(self._under_way) >= MOST_RUNS:
            return False
        on_their_way = sum(len(keys) * one.page_size for one, keys in self._under_way)
        if on_their_way and on_their_way + len(run.keys) * ns.page_size > WINDOW:
            return False
        if ns.number < 0:
            try:
                ns.number = self._core.open_namespace(ns.name, ns.page_size)
            except EmsError as error:
                ns.reason = str(error)
                return False
        if not self._tiers.bring(tier, ns.number, run):
            return False
        self._under_way.append((ns, run.keys))
        ns.asked += len(run.keys)
        return True

    def _look_what_came(self) -> None:
        still = []
        for ns, keys in self._under_way:
            if self._tiers.comes(ns.number, keys):
                still.append((ns, keys))
                continue
            lost = sum(self._core.page(ns.number, key) is None for key in keys)
            ns.asked -= len(keys)
            ns.pages -= lost
            self._bytes -= lost * ns.page_size
            ns.coming.difference_update(keys)
        self._under_way = still

    def report(self) -> dict[str, Any]:
        return {
            "namespaces": [ns.report() for ns in self._spaces],
            "pages": sum(ns.pages for ns in self._spaces),
            "bytes": self._bytes,
            "on_their_way": sum(ns.asked for ns in self._spaces),
            "tiers": self._reasons,
        }
