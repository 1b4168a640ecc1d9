"""Copies what is hot on other hosts of a cluster into memory before anybody asks, and tells them what is hot here.

It runs on the node's loop, around :mod:`ems.pool.movement.hot_list`.  What always holds: what engines ask for goes
before; a page is proven like any that is fetched; one round is under way at a time, and one without an answer ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple, cast

from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.movement.hot_list import MOST_RUN_KEYS, TELL_AGAIN_SECONDS, HotPages, HotRun, runs_of
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
"""Keys that are looked at in one round, about a millisecond's work."""
COPIED_SHARE = 16
"""In a second at most one in so many bytes of memory is copied into."""

Bring = Callable[[int, int, KeyRun], bool]
Question = Callable[[TierState, Callable[[], None], Callable[[], object]], None]


class _Used(NamedTuple):
    key: bytes
    parent: bytes
    tail: Tail | None


class CopyingAhead:
    """Of the cluster ``state``, into ``memory`` bytes; ``question`` has it asked something, ``bring`` fetches a run.

    Pages of a namespace may go to the cluster and come from there while it ``moves``.
    """

    def __init__(
        self,
        state: TierState,
        core: PoolCore,
        memory: int,
        question: Question,
        bring: Bring,
        moves: Callable[[str], bool],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._tier = cast("AskedTier", state.tier)
        self._core = core
        self._question = question
        self._bring = bring
        self._moves = moves
        self._clock = clock
        self._wall = wall
        self._hot = HotPages(memory / COPIED_SHARE)
        self._due = 0.0
        self._told: dict[str, list[HotRun]] = {}
        """What the round under way tells."""

    # What is hot here

    def written(self, name: str, pages: Sequence[Leaving]) -> None:
        """The cluster has ``pages``, which were saved here."""
        if self._state.config.copy_ahead == "on_save" and self._moves(name):
            self._hot.tell(name, runs_of(pages, self._period()), self._clock())

    def used(self, name: str, pages: Sequence[Page]) -> None:
        """Engines of this host load ``pages``."""
        self._state.counts["copied_ahead_used"] += self._hot.used(name, (page.key for page in pages))
        now = self._clock()
        # What its writer keeps off the cluster nobody could copy.
        pages = self._state.due(pages, "on_save", "on_second_use")[:MOST_RUN_KEYS]
        if pages and self._moves(name) and self._hot.tells(name, pages[-1].key, now):
            self._hot.tell(name, runs_of(map(_used, pages), self._period()), now)

    def fetched(self, name: str, keys: Sequence[bytes]) -> None:
        """An engine asks for ``keys``, which have to be fetched: if they were copied ahead, that was for nothing."""
        self._hot.forget(name, keys)

    def clear(self, matches: Callable[[str], bool]) -> None:
        """The namespaces that are ``matches`` are being cleared: their lists are not to be written again."""
        self._hot.clear(matches)
        for name in list(filter(matches, self._told)):
            del self._told[name]

    def _period(self) -> int:
        return int(self._wall() // TELL_AGAIN_SECONDS)

    # A round

    def step(self) -> None:
        now = self._clock()
        if now < self._due or not self._state.reading.open or self._core.draining:
            return
        self._due = now + ANSWER_SECONDS
        used = [one for one in self._core.namespaces if self._core.now - one.last_used < IDLE_SECONDS]
        spaces = [one for one in used if self._moves(one.name)]
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
        if not self._state.reads:
            return
        left = MOST_ROUND_KEYS
        for name, runs in heard.items():
            if not self._moves(name):
                continue
            due = self._hot.heard(name, runs, now, left)
            left -= sum(run.pages for run in due)
            unknown = [key for run in due for key in self._tier.unknown(name, self._missing(name, run)[1]).keys]
            copy = partial(self._copy, name, due)
            if unknown:
                self._question(self._state, partial(self._tier.ask, name, unknown), copy)
            else:
                copy()

    def _missing(self, name: str, run: HotRun) -> tuple[bytes, list[bytes]]:
        """The first pages of ``run`` that memory lacks, and which page is before them."""
        number, parent, keys = self._core.find_namespace(name), run.parent, run.keys
        for at, key in enumerate(keys) if number >= 0 else ():
            if self._core.page(number, key) is None:
                return parent, list(takewhile(lambda one: self._core.page(number, one) is None, keys[at:]))
            parent = key
        return parent, []

    def _copy(self, name: str, runs: Sequence[HotRun]) -> None:
        """Have those pages of ``runs`` fetched that the cluster is known to have."""
        coming: set[bytes] = {bytes(NO_PARENT)}
        for at, run in enumerate(runs):
            parent, missing = self._missing(name, run)
            if not missing:
                self._hot.settled(name, run)
                continue
            number = self._core.find_namespace(name)
            keys = missing[: self._tier.holds(name, missing)]
            if not keys or (parent not in coming and self._core.page(number, parent) is None):
                continue
            if not self._hot.may_copy(len(keys) * self._core.named(number)[1], self._clock()):
                self._hot.postponed(name, runs[at:], self._clock())
                return
            if run.tail is not None and run.last == keys[-1]:
                self._tier.know_tail(name, run.tail)
            if self._bring(self._state.number, number, KeyRun(parent, keys)):
                coming.update(keys)
                self._hot.copied(name, keys)
                self._state.counts["copied_ahead"] += len(keys)


def _used(page: Page) -> _Used:
    return _Used(page.key, page.parent.key if page.parent is not None else bytes(NO_PARENT), page.tail)
