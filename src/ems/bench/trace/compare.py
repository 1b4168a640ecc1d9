"""Policies side by side: one trace through each policy at each capacity, beside what could be had at most.

A comparison is shown as tables, and as a plot in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ems.bench.trace.replay import Replayed, optimal_hits, replay
from ems.bench.trace.traffic import TraceRequest
from ems.config import PolicyName
from ems.errors import ConfigError
from ems.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
"""Of a plot, as the ending of its file."""
Progress = Callable[[str, int, int], None]
"""Is told what is being run, how many requests of it are done, and of how many."""


class TracePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run: capacities in blocks, and a queue of ``look_ahead`` announced requests; 0 announces none.

    With a ``tier`` rate (blocks a second that a tier below brings up) it is measured what of that is in memory in time.
    """

    policies: tuple[PolicyName, ...]
    capacities: tuple[int, ...]
    look_ahead: int = 0
    tier_rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("no policy is named, expected some such as forecast,lru")
        if not self.capacities or min(self.capacities) < 1:
            raise ConfigError("capacities are numbers of blocks above 0, such as 5000,10000")
        if self.look_ahead < 0 or not 0 <= self.tier_rate < inf:
            raise ConfigError("a look-ahead and the rate of a tier are finite and cannot be negative, 0 does without")


class PolicyRow(msgspec.Struct, frozen=True):
    """One policy at one capacity: the share of all blocks that were hits.

    ``of_lru`` is the share in that of LRU at the same capacity.
    """

    policy: PolicyName
    capacity: int
    share: float
    of_lru: float | None
    tier: Replayed | None = None
    tier_share: float | None = None


class Comparison(msgspec.Struct, frozen=True):
    """All rows, and the optimum of each capacity in the order of the plan."""

    plan: TracePlan
    requests: int
    blocks: int
    distinct: int
    optimum: list[float]
    rows: list[PolicyRow]


def compare(requests: Sequence[TraceRequest], plan: TracePlan, progress: Progress) -> Comparison:
    """Run ``plan`` over ``requests``; LRU is run beside, if it is not among the policies, to compare with."""
    blocks = sum(len(request.keys) for request in requests)
    distinct = len({key for request in requests for key in request.keys})
    optimum, rows = [], []
    total = len(requests)

    def telling(what: str, capacity: int) -> Callable[[int], None]:
        return lambda done: progress(f"{what} at {capacity}", done, total)

    for capacity in plan.capacities:
        telling("optimum", capacity)(0)
        optimum.append(optimal_hits(requests, capacity) / blocks)
        telling("optimum", capacity)(total)
        shares: dict[PolicyName, float] = {}
        for policy in dict.fromkeys((*plan.policies, "lru")):
            tell = telling(policy, capacity)
            shares[policy] = replay(requests, capacity, policy, look_ahead=plan.look_ahead, progress=tell).share
        base = shares["lru"]
        for policy in plan.policies:
            tier = None
            if plan.tier_rate:
                tell, ahead = telling(f"{policy} above a tier", capacity), plan.look_ahead
                tier = replay(requests, capacity, policy, look_ahead=ahead, tier_rate=plan.tier_rate, progress=tell)
            share = shares[policy]
            of_lru, in_time = share / base if base else None, None if tier is None else tier.in_memory
            rows.append(PolicyRow(policy, capacity, share, of_lru, tier, in_time))
    return Comparison(plan, total, blocks, distinct, optimum, rows)


def table(found: Comparison) -> Table:
    plan = found.plan
    ahead = f", {plan.look_ahead} requests ahead announced" if plan.look_ahead else ""
    rows = []
    for capacity, optimum in zip(plan.capacities, found.optimum, strict=True):
        cells = []
        for row in found.rows:
            if row.capacity == capacity:
                times = f" ({row.of_lru:.2f}x)" if row.of_lru is not None and row.policy != "lru" else ""
                cells.append(f"{row.share:.1%}{times}")
        rows.append((f"{capacity:,}", *cells, f"{optimum:.1%}"))
    title = f"Hits in {found.blocks:,} blocks of {found.requests:,} requests ({found.distinct:,} different){ahead}"
    remark = "In brackets: in hits of lru. The optimum knows the future."
    return Table(("blocks of memory", *plan.policies, "optimum"), rows, title, remark)


def tier_table(found: Comparison) -> Table | None:
    """What of the blocks that any tier held was in memory when its request was scheduled; None without a tier."""
    if not found.plan.tier_rate:
        return None
    rows = []
    for row in found.rows:
        if (of := row.tier) is not None:
            figures = (f"{of.held:,}", f"{of.hits:,}", f"{of.in_memory:.1%}", f"{of.brought:,}")
            rows.append((f"{row.capacity:,}", row.policy, *figures))
    title = (
        "In memory when scheduled, of what any tier held: "
        f"a tier below brings up {found.plan.tier_rate:g} blocks a second, {found.plan.look_ahead} requests wait"
    )
    return Table(("blocks of memory", "policy", "held", "in memory", "share", "brought up"), rows, title)


def refuse_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, install it with: pip install 'ems-kv[plot]'")
    if path.suffix not in FORMATS or not path.parent.is_dir():
        raise ConfigError(f"cannot draw into {path}, give a .svg, .png or .pdf file in a folder that is there")


def plot(found: Comparison, path: Path) -> None:
    """Draw hits over capacity into ``path``, in the format that its ending names (.svg, .png, .pdf)."""
    refuse_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    capacities = list(found.plan.capacities)
    axes.plot(capacities, [100 * share for share in found.optimum], "--", color="grey", label="optimum")
    for policy in found.plan.policies:
        rows = [row for row in found.rows if row.policy == policy]
        axes.plot([row.capacity for row in rows], [100 * row.share for row in rows], marker="o", label=policy)
    axes.set(xlabel="blocks of memory", ylabel="hits in % of blocks", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


def save_plot(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {path}: {error}; give a file that ends in .svg, .png or .pdf") from error
