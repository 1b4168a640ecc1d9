"""Copies what is hot on other hosts of a cluster into memory before anybody asks, and tells them what is hot here.

It runs on the node's loop, around :mod:`ems.pool.movement.hot_list` and :mod:`ems.pool.movement.unused_copies`.  What
always holds: a copy begins only while nothing else is fetched, and no engine waits for more than :data:`BURST` of it;
no page leaves memory for a copy, and copies that nobody used hold no more than one in :data:`UNUSED_SHARE` bytes of it;
a page is proven like any that is fetched; one round is under way at a time, and one without an answer ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple, cast

from ems.config import MIB
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.movement.hot_list import MOST_RUN_KEYS, TELL_AGAIN_SECONDS, HotPages, HotRun, runs_of
from ems.pool.movement.unused_copies import UnusedCopies
from ems.pool.names import tenant_of
from ems.pool.pages import Page
from ems.pool.tiers.answers import KeyRun
from ems.pool.tiers.pass_through import Leaving
from ems.pool.tiers.seam import AskedTier
from ems.pool.tiers.tier_state import TierState

ROUND_SECONDS = 1.0
IDLE_SECONDS = 3600.0
"""A namespace that was not used for so long is not looked for."""
ANSWER_SECONDS = 10.0
"""A round that is not answered until then was called off."""
MOST_NAMESPACES = 64
"""Of which lists are read, those that were used last."""
MOST_ROUND_KEYS = 2048
"""Keys that are looked at in one round, and runs, some milliseconds' work."""
UNUSED_SHARE = 8
"""One in so many bytes of memory may be copies that nobody used."""
BURST = 32 * MIB
"""Bytes that are copied in one go at most: what engines ask for waits for the rest of that."""
BURST_SECONDS = 0.03
"""How long they take at most, as far as is known."""
KNOWN_SECONDS = 4.0
"""How long it is known at least that the cluster has what it said to have."""

Bring = Callable[[int, int, KeyRun], bool]
Question = Callable[[TierState, Callable[[], None], Callable[[], object]], None]


class _Used(NamedTuple):
    key: bytes
    parent: bytes
    tail: Tail | None


class _Known(NamedTuple):
    runs: list[HotRun]
    until: float
    """How long the cluster's answer holds."""


class CopyingAhead:
    """Of the cluster ``state``; ``question`` has it asked something, ``bring`` fetches a run.

    That is done while nothing else is fetched, which ``idle`` tells.  Pages of a namespace may go to the cluster and
    come from there while it ``moves``.
    """

    def __init__(
        self,
        state: TierState,
        core: PoolCore,
        question: Question,
        bring: Bring,
        idle: Callable[[], bool],
        moves: Callable[[str], bool],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._tier = cast("AskedTier", state.tier)
        self._core = core
        self._question = question
        self._bring = bring
        self._idle = idle
        self._moves = moves
        self._clock = clock
        self._wall = wall
        self._hot = HotPages()
        self._unused = UnusedCopies()
        self._tenants = 1
        """Whose namespaces were used within an hour."""
        self._due = 0.0
        self._looked: dict[str, float] = {}
        """When the list of each namespace was looked at, as far as there was time for it."""
        self._to_copy: dict[str, _Known] = {}
        """What others told, as far as the cluster was asked for it and it is not being fetched; who waits for longest
        first."""
        self._clears = 0
        self._told: dict[str, list[HotRun]] = {}
        """What the round under way tells."""

    # What is hot here

    def written(self, name: str, pages: Sequence[Leaving]) -> None:
        """The cluster has ``pages``, which were saved here."""
        if self._state.config.copy_ahead == "on_save" and self._moves(name):
            self._hot.tell(name, runs_of(pages, self._period()), self._clock())

    def used(self, name: str, pages: Sequence[Page]) -> None:
        """Engines of this host load ``pages``."""
        self._state.counts["copied_ahead_used"] += self._unused.discard(name, (page.key for page in pages))
        now = self._clock()
        # What its writer keeps off the cluster nobody could copy.
        pages = self._state.due(pages, "on_save", "on_second_use")[:MOST_RUN_KEYS]
        if pages and self._moves(name) and self._hot.tells(name, pages[-1].key, now):
            self._hot.tell(name, runs_of(map(_used, pages), self._period()), now)

    def discard(self, name: str, keys: Sequence[bytes]) -> None:
        """An engine asks for ``keys``, which have to be fetched, or saved them: they are no copies."""
        self._unused.discard(name, keys)

    def is_copy(self, name: str, key: bytes) -> bool:
        """Whether the page is copied, or was, and nobody used it yet."""
        return self._unused.has(name, key)

    def arrived(self, name: str, keys: Sequence[bytes]) -> None:
        """``keys``, some of which may be copies, were fetched."""
        self._state.counts["copied_ahead"] += sum(self._unused.has(name, key) for key in keys)

    def clear(self, matches: Callable[[str], bool]) -> None:
        """The namespaces that are ``matches`` are being cleared: their lists are not to be written again."""
        self._clears += 1
        self._hot.clear(matches)
        self._unused.clear(matches)
        for table in (self._told, self._to_copy):
            for name in list(filter(matches, table)):
                del table[name]

    def _period(self) -> int:
        return int(self._wall() // TELL_AGAIN_SECONDS)

    # A round

    def step(self) -> None:
        now = self._clock()
        if not self._state.reading.open or self._core.draining:
            self._to_copy.clear()
            return
        self._copy(now)
        if now < self._due:
            return
        self._due = now + ANSWER_SECONDS
        self._unused.look(self._is_here, now)
        used = [one for one in self._core.namespaces if self._core.now - one.last_used < IDLE_SECONDS]
        spaces = [one for one in used if self._moves(one.name)]
        self._tenants = max(len({tenant_of(one.name) for one in spaces}), 1)
        spaces.sort(key=lambda one: (self._hot.waits(one.name), one.last_used), reverse=True)
        if not spaces:
            self._due = now + ROUND_SECONDS
            return
        told = self._told = {ns.name: self._hot.take(ns.name) for ns in islice(spaces, MOST_NAMESPACES)}
        self._state.counts["hot_runs_told"] += sum(map(len, told.values()))
        heard: dict[str, list[HotRun]] = {}
        # The question may have to wait: what is cleared until then is not told any more.
        self._question(self._state, lambda: heard.update(self._tier.share_hot(dict(told))), lambda: self._heard(heard))

    def _heard(self, heard: dict[str, list[HotRun]]) -> None:
        now = self._clock()
        self._due = now + ROUND_SECONDS
        if not self._state.reads or not self._idle():  # who has no time to copy asks for nothing
            return
        left = MOST_ROUND_KEYS
        self._looked = {name: self._looked.get(name, 0.0) for name in heard}
        for name in sorted(heard, key=self._looked.__getitem__):
            if left <= 0:
                break
            self._looked[name] = now
            runs = heard[name]
            if not runs or not self._may_have(name) or not self._moves(name) or name in self._to_copy:
                continue
            due = self._hot.heard(name, runs, now, left, self._period())
            left -= len(runs) + sum(run.pages for run in due)
            room = self._room(name) if due else 0
            unknown, wanted = list[bytes](), list[HotRun]()
            for run in due:
                missing = self._missing(name, run)[1][:room]
                if missing:
                    wanted.append(run)
                    unknown += self._tier.unknown(name, missing).keys
                elif room > 0:
                    self._hot.settled(name, run)
                else:  # no more is asked for than may be copied
                    self._hot.postponed(name, run, now)
                room -= len(missing)
            answered = partial(self._answered, name, wanted, self._clears)
            if unknown:
                self._question(self._state, partial(self._tier.ask, name, unknown), answered)
            elif wanted:
                answered()

    def _answered(self, name: str, runs: list[HotRun], clears: int) -> None:
        if clears == self._clears and self._moves(name):
            self._to_copy[name] = _Known(runs, self._clock() + KNOWN_SECONDS)

    def _may_have(self, name: str) -> int:
        """How many pages of the namespace may be copied, as far as they find room."""
        number, most = self._core.find_namespace(name), self._core.slots.total // UNUSED_SHARE
        return self._unused.room(name, self._core.named(number)[1], most, self._tenants) if number >= 0 else 0

    def _room(self, name: str) -> int:
        """How many pages of the namespace may be copied, and need none to leave for them."""
        most = self._may_have(name)
        space = self._core.namespaces.opened(self._core.find_namespace(name)) if most else None
        return 0 if space is None else min(most, self._core.reclaimer.idle_room(space))

    def _is_here(self, name: str, key: bytes) -> bool:
        number = self._core.find_namespace(name)
        return number >= 0 and self._core.page(number, key) is not None

    def _missing(self, name: str, run: HotRun) -> tuple[bytes, list[bytes]]:
        """The first pages of ``run`` that memory lacks, and which page is before them."""
        number, parent, keys = self._core.find_namespace(name), run.parent, run.keys
        for at, key in enumerate(keys) if number >= 0 else ():
            if self._core.page(number, key) is None:
                return parent, list(takewhile(lambda one: self._core.page(number, one) is None, keys[at:]))
            parent = key
        return parent, []

    def _copy(self, now: float) -> None:
        """Have pages fetched that the cluster is known to have, if nothing else is fetched."""
        left = self._burst(now) if self._to_copy and self._idle() else 0
        while self._to_copy and left > 0:
            name, known = next(iter(self._to_copy.items()))
            left = self._copy_of(name, known, left, now)
            del self._to_copy[name]
            if known.runs:  # the others first
                self._to_copy[name] = known

    def _burst(self, now: float) -> int:
        """Bytes that may be copied in one go, one or more."""
        line = self._state.speed.fetched.line(now, draw=False)
        bytes_each_second = 1 / line.per_unit if line is not None and line.per_unit else float("inf")
        return int(min(BURST, BURST_SECONDS * bytes_each_second)) or 1

    def _copy_of(self, name: str, known: _Known, left: int, now: float) -> int:
        """Have up to ``left`` bytes of what is ``known`` fetched, which leaves it; what is left of these.

        Nothing is left when there is more of it.
        """
        number, room, runs = self._core.find_namespace(name), self._room(name), known.runs
        coming: set[bytes] = {bytes(NO_PARENT)}
        while runs and room and now < known.until:
            parent, missing = self._missing(name, runs[0])
            keys = missing[: self._tier.holds(name, missing)]
            if not missing:
                self._hot.settled(name, runs[0])
            if keys and (parent in coming or self._core.page(number, parent) is not None):
                size = self._core.named(number)[1]
                part = keys[: min(room, max(left // size, 1))]
                if runs[0].tail is not None and runs[0].last == part[-1]:
                    self._tier.know_tail(name, runs[0].tail)
                if not self._bring(self._state.number, number, KeyRun(parent, part)):
                    return 0
                coming.update(part)
                self._unused.add(name, part, size, now)  # behind what was brought, which counts as no copy
                left, room = left - len(part) * size, room - len(part)
                if left <= 0 or len(part) < len(keys):
                    return 0
            del runs[0]
        for run in runs:
            self._hot.postponed(name, run, now)
        runs.clear()
        return left


def _used(page: Page) -> _Used:
    return _Used(page.key, page.parent.key if page.parent is not None else bytes(NO_PARENT), page.tail)
