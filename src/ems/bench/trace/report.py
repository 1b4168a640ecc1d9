"""How a comparison of policies is shown: a table, and a plot as a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ems.bench.trace.compare import Comparison
from ems.errors import ConfigError
from ems.tables import Table


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
    return Table(
        ("blocks of memory", *plan.policies, "optimum"),
        rows,
        f"Hits in {found.blocks:,} blocks of {found.requests:,} requests ({found.distinct:,} different){ahead}",
        "In brackets: in hits of lru. The optimum knows the future.",
    )


def tier_table(found: Comparison) -> Table | None:
    """What of the blocks that any tier held was in memory when its request was scheduled; None without a tier."""
    if not found.plan.tier_rate:
        return None
    rows = [
        (
            f"{row.capacity:,}",
            row.policy,
            f"{row.tier.held:,}",
            f"{row.tier.in_memory:,}",
            f"{row.tier.share:.1%}",
            f"{row.tier.brought:,}",
        )
        for row in found.rows
        if row.tier is not None
    ]
    title = (
        "In memory when scheduled, of what any tier held: "
        f"a tier below brings up {found.plan.tier_rate:g} blocks a second, {found.plan.look_ahead} requests wait"
    )
    return Table(("blocks of memory", "policy", "held", "in memory", "share", "brought up"), rows, title)


FORMATS = (".svg", ".png", ".pdf")


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
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {path}: {error}; give a file that ends in .svg, .png or .pdf") from error
