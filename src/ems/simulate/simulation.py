"""A whole run: every request of a workload through a cluster, figures of it, and what the loss of hosts costs.

What a loss costs are the blocks that are computed after it although the lost hosts had them: those that were to be
evicted before they were asked for again are among them, so it costs at most this.  The difference between a run with
the loss and one without it says less: two runs drift apart by more than a host has.  What always holds: figures of a
sample are given for the whole (bytes, calls, blocks), shares as found; the same plan gives the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import accumulate
from statistics import stdev

import msgspec

from ems.simulate.cluster import Cluster, Served, Source
from ems.simulate.master import CLIENT_TTL
from ems.simulate.plan import Plan
from ems.simulate.routing import Router
from ems.simulate.workload import GROUPS, Workload

PINGS = 1.0
"""Calls a second with which each host says to the master that it lives."""
REFILLED = 0.95
"""A loss is over when this share of all hits that it costs were lost."""
TELL_EVERY = 512
SUMMED = ("fetched", "written", "read", "persisted", "lost_memory", "lost_part")
"""Figures of each window that are sums of what requests did."""
Progress = Callable[[str, int, int], None]


class Window(msgspec.Struct):
    """Figures of a part of the time that begins at ``at``: blocks by source, bytes, calls of the master."""

    at: float
    blocks: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(Source))
    calls: float = 0.0
    """A second."""
    master_busy: float = 0.0
    """Share of the time that the master works; above 1 it cannot."""
    fetched: float = 0.0
    written: float = 0.0
    read: float = 0.0
    persisted: float = 0.0
    lost_memory: float = 0.0
    lost_part: float = 0.0
    """Hits that the loss of hosts cost: of their memory, and of their part of the cluster."""


class Run(msgspec.Struct, frozen=True):
    """All of one run.  ``errors`` are standard errors of ``shares``, none where all sessions were simulated."""

    requests: int
    blocks: float
    shares: dict[str, float]
    errors: dict[str, float] | None
    prompt_seconds: float
    """Mean until a prompt is there."""
    prompt_seconds_alone: float
    """The same where all is computed."""
    calls: float
    """Of the master a second, on average and at most in a window."""
    most_calls: float
    most_master_busy: float
    keys_a_call: float
    fetched: float
    """Bytes: from other hosts, to other hosts, from the persistent tier, to it."""
    written: float
    read: float
    persisted: float
    evicted_from_cluster: float
    refused_by_cluster: float
    failed: float
    """Blocks that were to be fetched from or written to a host that was gone."""
    windows: list[Window]


class Loss(msgspec.Struct, frozen=True):
    """What the loss of hosts cost at most: hits, by where the blocks were, and until when."""

    memory_hits: float
    part_hits: float
    refilled_after: float
    """Seconds until :data:`REFILLED` of these hits were lost, to the end of a window."""
    failed: float
    """Blocks that were to be fetched from or written to a host that was gone."""


class Simulated(msgspec.Struct, frozen=True):
    """What was simulated, with nothing that differs from one time to the next."""

    plan: Plan
    pages: int
    run: Run
    loss: Loss | None


def name_of(source: Source) -> str:
    return source.name.lower()


def simulate(plan: Plan, workload: Workload, progress: Progress) -> Simulated:
    run = _Runner(plan, workload, progress).run()
    return Simulated(plan, plan.pages, run, _cost(plan, run) if plan.lose else None)


def _cost(plan: Plan, run: Run) -> Loss:
    lost = list(accumulate(one.lost_memory + one.lost_part for one in run.windows))
    ends = (
        one.at + plan.window for one, so_far in zip(run.windows, lost, strict=True) if so_far >= REFILLED * lost[-1]
    )
    memory, part = sum(one.lost_memory for one in run.windows), sum(one.lost_part for one in run.windows)
    return Loss(memory, part, max(next(ends) - plan.lose_at, 0.0) if lost and lost[-1] else 0.0, run.failed)


class _Runner:
    """One run under way."""

    def __init__(self, plan: Plan, workload: Workload, progress: Progress) -> None:
        self._plan = plan
        self._workload = workload
        self._progress = progress
        self._cluster = Cluster(plan)
        self._router = Router(plan.hosts, plan.routing, 1 / plan.sample)
        lost = range(plan.lose)
        down = plan.lose_at + plan.down
        self._to_come = [
            (plan.lose_at, partial(self._lose, lost)),
            (min(plan.lose_at + CLIENT_TTL, down), partial(self._unmount, lost)),
            (down, partial(self._back, lost, down)),
        ]
        count = int(workload.at[-1] // plan.window) + 1 if len(workload) else 0
        self._windows = [Window(number * plan.window) for number in range(count)]
        self._groups = [[0] * len(Source) for _ in range(GROUPS)]
        self._all = Served([0] * len(Source))

    def _lose(self, lost: Collection[int]) -> None:
        self._cluster.lose(lost)
        for host in lost:
            self._router.gone(host)

    def _unmount(self, lost: Iterable[int]) -> None:
        for host in lost:
            self._cluster.master.unmount(host)

    def _back(self, lost: Iterable[int], now: float) -> None:
        for host in lost:
            self._cluster.back(host)
            self._router.back(host, now)

    def run(self) -> Run:
        work, total = self._workload, len(self._workload)
        columns = (work.at, work.copy, work.number, work.session, work.group, work.draw)
        for begin in range(0, total, TELL_EVERY):
            self._progress("requests", begin, total)
            part = (column[begin : begin + TELL_EVERY].tolist() for column in columns)
            for at, copy, number, session, group, draw in zip(*part, strict=True):
                while self._to_come and self._to_come[0][0] <= at:
                    self._to_come.pop(0)[1]()
                keys = work.keys(copy, number)
                host = self._router.choose(session, draw, at)
                done = self._cluster.request(host, keys, at)
                self._router.computes(host, done.computed_seconds, at)
                self._count(done, self._windows[int(at // self._plan.window)], group)
        self._progress("requests", total, total)
        return self._report()

    def _count(self, done: Served, window: Window, group: int) -> None:
        of_group, total = self._groups[group], self._all
        for source, blocks in enumerate(done.blocks):
            window.blocks[source] += blocks
            of_group[source] += blocks
        window.calls += done.calls
        window.master_busy += done.keys
        for name in ("seconds", "calls", "keys", "failed"):
            setattr(total, name, getattr(total, name) + getattr(done, name))
        for name in SUMMED:
            more = getattr(done, name)
            if more:
                setattr(window, name, getattr(window, name) + more)
                setattr(total, name, getattr(total, name) + more)

    def _report(self) -> Run:
        plan, total, network = self._plan, self._all, self._plan.network
        weight, count = 1 / plan.sample, len(self._workload)
        pings = plan.hosts * PINGS if plan.cluster_blocks else 0.0
        for window in self._windows:
            window.blocks = [weight * blocks for blocks in window.blocks]
            calls, keys = window.calls * weight / plan.window, window.master_busy * weight / plan.window
            window.calls = calls + pings
            window.master_busy = window.calls * network.rpc_cost + keys * network.key_cost
            for name in SUMMED:
                setattr(window, name, getattr(window, name) * weight)
        sums = [sum(group[source] for group in self._groups) for source in Source]
        blocks = sum(sums)
        master = self._cluster.master
        return Run(
            requests=round(count * weight),
            blocks=blocks * weight,
            shares={name_of(source): sums[source] / blocks if blocks else 0.0 for source in Source},
            errors=self._errors() if plan.sample < 1 else None,
            prompt_seconds=total.seconds / count if count else 0.0,
            prompt_seconds_alone=blocks * network.compute / count if count else 0.0,
            calls=sum(one.calls for one in self._windows) / max(len(self._windows), 1),
            most_calls=max((one.calls for one in self._windows), default=0.0),
            most_master_busy=max((one.master_busy for one in self._windows), default=0.0),
            keys_a_call=total.keys / total.calls if total.calls else 0.0,
            fetched=total.fetched * weight,
            written=total.written * weight,
            read=total.read * weight,
            persisted=total.persisted * weight,
            evicted_from_cluster=master.evicted * weight,
            refused_by_cluster=master.refused * weight,
            failed=total.failed * weight,
            windows=self._windows,
        )

    def _errors(self) -> dict[str, float]:
        """Of the shares, by how much the groups of sessions differ; what is simulated of all counts as known."""
        dealt = [group for group in self._groups if sum(group)]
        unknown = ((1 - self._plan.sample) / max(len(dealt), 1)) ** 0.5
        shares = {source: [group[source] / sum(group) for group in dealt] for source in Source}
        return {name_of(one): stdev(of) * unknown if len(of) > 1 else 1.0 for one, of in shares.items()}
