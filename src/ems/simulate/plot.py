"""A simulation drawn: where blocks came from over time, what the network and the master had to do, what a loss cost."""

from __future__ import annotations

from pathlib import Path

from ems.bench.trace.compare import refuse_plot, save_plot
from ems.simulate.cluster import Source
from ems.simulate.report import WORDS
from ems.simulate.simulation import Simulated


def plot(found: Simulated, path: Path) -> None:
    """Draw into ``path``, in the format that its ending names (.svg, .png, .pdf)."""
    refuse_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    shares, traffic, master = figure.subplots(3, sharex=True)
    windows = found.run.windows
    at = [one.at for one in windows]
    asked = [sum(one.blocks) or 1.0 for one in windows]
    parts = [
        [100 * one.blocks[source] / all_ for one, all_ in zip(windows, asked, strict=True)]
        for source in Source
        if source != Source.COMPUTED
    ]
    shares.stackplot(at, *parts, labels=[WORDS[one] for one in Source if one != Source.COMPUTED])
    if found.loss is not None:
        lost = [100 * (one.lost_memory + one.lost_part) / all_ for one, all_ in zip(windows, asked, strict=True)]
        shares.plot(at, lost, "k--", label=f"lost with {found.plan.lose} hosts")
        shares.axvline(found.plan.lose_at, color="grey", linewidth=0.8)
    shares.set(ylabel="hits in % of blocks", ylim=(0, None))
    for name, label in (("fetched", "from other hosts"), ("written", "to other hosts"), ("read", "persistent, read"),
                        ("persisted", "persistent, written")):  # fmt: skip
        traffic.plot(at, [getattr(one, name) / found.plan.window / 1e9 for one in windows], label=label)
    traffic.set(ylabel="GB/s, all hosts")
    master.plot(at, [one.calls for one in windows], label="calls of the master a second")
    master.set(ylabel="calls a second", xlabel="seconds", ylim=(0, None))
    for axes in (shares, traffic, master):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_plot(figure, path)
