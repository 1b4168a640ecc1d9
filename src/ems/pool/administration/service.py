"""Does what an administrator asks, and says what it did: plain figures, the same for people and scripts.

A brain.  What always holds: one call looks at a bounded number of pages, whatever is asked; what takes longer becomes
a pass that goes on in :meth:`AdminService.step`; with ``dry_run`` nothing changes; the last :data:`MAX_JOBS` passes
can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from ems.config import format_size
from ems.errors import ConfigError, PoolRefused, StaleReference
from ems.pool.administration.clearing import DeepClearing
from ems.pool.administration.inspector import Inspector
from ems.pool.administration.passes import Clearing, Pinning
from ems.pool.administration.refilling import Refilling
from ems.pool.administration.resize import Shrinking, plan
from ems.pool.administration.selection import means, nothing_matches, unknown_namespace
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import split_keys
from ems.pool.protocol import acts
from ems.pool.segments.plan import MAX_SEGMENTS

if TYPE_CHECKING:
    from ems.pool.tiers.manager import TierManager

MAX_JOBS = 64
"""Passes that are remembered after their end."""
MAX_RUNNING = 8
"""Passes at a time."""

Report = dict[str, Any]


class Pass(Protocol):
    """Work in steps."""

    def step(self, now: float) -> bool: ...

    @property
    def done(self) -> bool: ...

    def report(self) -> Report: ...


class AdminService:
    """The administrator's side of one node.

    ``free_bytes`` tells how much memory it may still get, ``who`` what is to be said of the owner of a lease.
    """

    def __init__(
        self,
        core: PoolCore,
        free_bytes: Callable[[], int] = lambda: 1 << 62,
        tiers: TierManager | None = None,
        who: Callable[[int], Report] = lambda _: {},
    ) -> None:
        self._who = who
        self._core = core
        self._tiers = tiers
        self._inspector = Inspector(core, tiers)
        self.free_bytes = free_bytes
        self.added: list[int] = []
        self.given_up: list[int] = []
        """Segments whose memory is to be had, and to be given back; whoever does it takes them out."""
        self._running: dict[int, Pass] = {}
        self._reports: dict[int, Report] = {}
        self._next_job = 1
        self._given_before = 0
        """Pages that other hosts had got when the node began to be drained."""
        self._verbs: dict[type, Callable[[Any, bool, float], Report]] = {
            acts.List: lambda _act, _dry_run, now: self._inspector.overview(now),
            acts.Show: lambda act, _dry_run, now: self._inspector.show(act.what, now),
            acts.Clear: self._clear,
            acts.Drain: self._drain,
            acts.Follow: self._follow,
            acts.Pin: self._pin,
            acts.Warm: self._warm,
            acts.Refill: self._refill,
            acts.Resize: self._resize,
            acts.CancelResize: self._cancel_resize,
        }

    def do(self, act: acts.Acts, now: float, *, dry_run: bool = False) -> Report:
        """Do ``act``, or say what it would do.  Raises PoolRefused: it cannot be done, with the reason."""
        acts.check_act(act)
        return self._verbs[type(act)](act, dry_run, now)

    # Passes

    @property
    def passes(self) -> int:
        return len(self._running)

    def step(self, now: float) -> bool:
        at_once = False
        for job in list(self._running):
            at_once = self._step(job, now) or at_once
        return at_once

    def _step(self, job: int, now: float) -> bool:
        running = self._running[job]
        at_once = running.step(now)
        if running.done:
            del self._running[job]
            self._reports[job] = self._report_of(running, job)
            if len(self._reports) > MAX_JOBS:
                del self._reports[next(iter(self._reports))]
        return at_once

    def _may_begin(self) -> None:
        """Comes before anything is changed: what is refused has done nothing."""
        if len(self._running) >= MAX_RUNNING:
            raise PoolRefused(f"{MAX_RUNNING} passes are running, wait until one is done")

    def _begin(self, work: Pass, now: float) -> Report:
        self._may_begin()
        job, self._next_job = self._next_job, self._next_job + 1
        self._running[job] = work
        # What is done in one step needs nobody to come back for it; other passes go on in their own time, because what
        # they take out would be neither this one's doing nor in its figures.
        self._step(job, now)
        return self._follow(acts.Follow(job), False, now)

    def _follow(self, act: acts.Follow, _dry_run: bool, _now: float) -> Report:
        if act.job in self._reports:
            return self._reports[act.job]
        running = self._running.get(act.job)
        if running is None:
            raise StaleReference(f"there is no job {act.job}, or it ended long ago")
        return self._report_of(running, act.job)

    def _report_of(self, work: Pass, job: int) -> Report:
        report = work.report()
        held_by = [{**one, **self._who(one["client_id"])} for one in report.get("held_by", ())]
        return {**report, **({"held_by": held_by} if "held_by" in report else {}), "job": job, "done": work.done}

    # Changing

    def _clear(self, act: acts.Clear, dry_run: bool, now: float) -> Report:
        self._may_begin()
        tiers = None if act.memory_only else self._tiers

        def matches(name: str) -> bool:
            return means(act, name)

        def known() -> list[str]:
            below = () if tiers is None else chain(*(held for _, held in tiers.holdings()))
            return list(dict.fromkeys([*(ns.name for ns in self._core.namespaces), *below]))

        def unmatched() -> str:
            names = known()
            named = (act.tenant, act.model, act.namespace) != (None, None, None)
            return nothing_matches(act, names) if named and not any(map(matches, names)) else ""

        if tiers is None and (mistake := unmatched()):
            raise PoolRefused(mistake)
        oldest = None if act.older_than is None else now - act.older_than
        namespaces = [one for one in self._core.namespaces if matches(one.name)]
        work: Clearing | DeepClearing
        work = memory = Clearing(self._core, namespaces, oldest, now, dry_run=dry_run)
        if tiers is not None:
            age = act.older_than or 0.0
            work = DeepClearing(memory, self._core.namespaces, tiers, matches, age, unmatched, dry_run=dry_run)
        return {"namespaces": list(filter(matches, known())), **self._begin(work, now)}

    def _drain(self, act: acts.Drain, dry_run: bool, _now: float) -> Report:
        waiting, given, out = self._tiers.leaving() if self._tiers is not None else (0, 0, [])
        if not dry_run:
            if act.draining and not self._core.draining:
                self._given_before = given
            self._core.draining = act.draining
        if not self._core.draining:
            waiting, given, out = 0, self._given_before, []
        stats = self._core.stats()
        held = {name: stats[name] for name in ("leases", "reservations", "slots_resting")}
        given_now = {"pages_leaving": waiting, "pages_given": given - self._given_before, "left_alone": out}
        return {"draining": self._core.draining, **held, **given_now}

    def _pin(self, act: acts.Pin, dry_run: bool, now: float) -> Report:
        number = self._core.find_namespace(act.namespace)
        if number < 0:
            raise PoolRefused(unknown_namespace(act.namespace, [ns.name for ns in self._core.namespaces]))
        namespace = self._core.namespaces[number]
        keys = split_keys(act.keys) if act.keys else [page.key for page in namespace.index]
        if not act.pinned and not act.keys:
            keys = list(namespace.pins.pinned)
        until = (now + act.seconds if act.seconds else inf) if act.pinned else None
        return self._begin(Pinning(self._core, namespace, keys, until, dry_run), now)

    def _below(self) -> TierManager:
        if self._tiers is None:
            raise PoolRefused("this node has no tier below memory from which pages could be brought, give it a --tier")
        return self._tiers

    def _refill(self, act: acts.Refill, dry_run: bool, now: float) -> Report:
        tiers = self._below()
        known = sorted({name for _, held in tiers.holdings() for name in held})
        names = [name for name in known if means(act, name)]
        if not names:
            raise PoolRefused(f"below memory {nothing_matches(act, known)}")
        return self._begin(Refilling(self._core, tiers, names, act.limit, dry_run=dry_run), now)

    def _warm(self, act: acts.Warm, dry_run: bool, _now: float) -> Report:
        tiers = self._below()
        number = self._core.find_namespace(act.namespace)
        page_size = 0 if number >= 0 else tiers.page_size(act.namespace)
        if number < 0 and not page_size:
            raise PoolRefused(f"neither memory nor a tier has the namespace {act.namespace[:80]}")
        keys = split_keys(act.keys)
        known = 0
        if number >= 0:
            index = self._core.namespaces[number].index
            known = sum(index.get(key) is not None for key in keys)
        if dry_run:
            return {"pages": len(keys), "in_memory": known, "on_their_way": 0}
        if number < 0:
            number = self._core.open_namespace(act.namespace, page_size)
        coming = tiers.prefetch(number, keys)
        return {"pages": len(keys), "in_memory": known, "on_their_way": max(coming - known, 0)}

    def _resize(self, act: acts.Resize, dry_run: bool, now: float) -> Report:
        if any(isinstance(running, Shrinking) for running in self._running.values()):
            raise PoolRefused("the pool is being resized, wait until that is done or end it with `ems resize --cancel`")
        ns = self._core.slots
        todo = plan(ns.segments, act.size)
        if len(ns.segments) + todo.add > MAX_SEGMENTS:
            raise PoolRefused(f"the pool would have more than {MAX_SEGMENTS} segments, restart it with larger ones")
        after = [one.size for one in ns.segments if one.size and one.number not in todo.give_up]
        try:
            self._core.shares.must_fit([*after, *[todo.size] * todo.add])
        except ConfigError as error:
            raise PoolRefused(str(error)) from error
        report: Report = {
            "segments": todo.segments,
            "bytes": todo.segments * todo.size,
            "added": todo.add,
            "taken": len(todo.give_up),
        }
        if dry_run:
            held = sum(ns.segments[number].used for number in todo.give_up)
            return {**report, "removed": held}
        if todo.add * todo.size > self.free_bytes():
            raise PoolRefused(
                f"{format_size(todo.add * todo.size)} more do not fit into shared memory, which has "
                f"{format_size(self.free_bytes())} free; give a smaller size"
            )
        self._may_begin()
        self.added += [ns.add(todo.size) for _ in range(todo.add)]
        return {**report, **self._begin(Shrinking(self._core, todo.give_up, self.given_up), now)}

    def _cancel_resize(self, _act: acts.CancelResize, dry_run: bool, _now: float) -> Report:
        for job, running in self._running.items():
            if isinstance(running, Shrinking):
                pins = running.report()["emptying"] if dry_run else running.cancel()
                segments = [one for one in self._core.slots.segments if one.size]
                figures = {"segments": len(segments), "bytes": sum(one.size for one in segments)}
                return {**self._report_of(running, job), **figures, "kept": pins, "done": True}
        raise PoolRefused("the pool is not being made smaller, so there is nothing to cancel")

    def freed(self, number: int) -> None:
        for running in self._running.values():
            if isinstance(running, Shrinking):
                running.freed(number)
