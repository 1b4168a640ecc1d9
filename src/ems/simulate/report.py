"""What people see of a simulation: tables."""

from __future__ import annotations

from ems.simulate.cluster import Source
from ems.simulate.simulation import REFILLED, Run, Simulated, name_of
from ems.tables import Table

WORDS = {
    Source.OWN_MEMORY: "own memory",
    Source.OWN_PART: "own part of the cluster",
    Source.OTHER_HOSTS: "other hosts",
    Source.PERSISTENT: "persistent tier",
    Source.COMPUTED: "computed",
}


def tables(found: Simulated) -> list[Table]:
    plan = found.plan
    shown = [_sources(found), _figures(found)]
    if found.loss is not None:
        loss = found.loss
        rows = [
            ("hits lost: memory of their nodes", f"{loss.memory_hits:,.0f}"),
            ("hits lost: their part of the cluster", f"{loss.part_hits:,.0f}"),
            (f"seconds until {REFILLED:.0%} of these were computed again", f"{loss.refilled_after:,.0f}"),
            ("blocks that met a host that was gone", f"{loss.failed:,.0f}"),
        ]
        title = (
            f"Loss of {plan.lose} of {plan.hosts:,} hosts after {plan.lose_at:g} s, back empty {plan.down:g} s later"
        )
        remark = (
            "Blocks that were computed though the lost hosts had them; some would have left before, so at most this."
        )
        shown.append(Table(("what it costs", "figure"), rows, title, remark))
    return shown


def _sources(found: Simulated) -> Table:
    plan, run = found.plan, found.run
    rows = [
        (WORDS[one], f"{run.shares[name_of(one)]:.2%}", *([f"{run.errors[name_of(one)]:.2%}"] if run.errors else ()))
        for one in Source
    ]
    title = (
        f"Where {run.blocks:,.0f} blocks of {run.requests:,} requests came from: "
        f"{plan.hosts:,} hosts with room for {found.pages:,} pages, {plan.routing} routing"
    )
    remark = ""
    if run.errors:
        remark = (
            f"A sample of {plan.sample:.3%} of the sessions, on hosts with as much of their memory. The standard error "
            "is that of the choice of sessions; that small memories evict a little earlier is not in it."
        )
    return Table(("blocks from", "share", *(["standard error"] if run.errors else ())), rows, title, remark)


def _figures(found: Simulated) -> Table:
    run = found.run
    rows = [
        ("moved from other hosts", _bytes(run.fetched)),
        ("moved to other hosts", _bytes(run.written)),
        ("read from the persistent tier", _bytes(run.read)),
        ("written to the persistent tier", _bytes(run.persisted)),
        ("evicted from the cluster", f"{run.evicted_from_cluster:,.0f} blocks"),
        ("refused by the cluster", f"{run.refused_by_cluster:,.0f} blocks"),
        ("calls of the master, mean", f"{run.calls:,.0f} a second"),
        ("calls of the master, most", f"{run.most_calls:,.0f} a second"),
        ("keys in a call", f"{run.keys_a_call:,.0f}"),
        ("master at work, most", _busy(run)),
        ("until a prompt is there", f"{run.prompt_seconds:.3f} s"),
        ("the same, all computed", f"{run.prompt_seconds_alone:.3f} s"),
    ]
    return Table(("figure", "value"), rows, f"Traffic, windows of {found.plan.window:g} s")


def _bytes(count: float) -> str:
    return f"{count / 1e12:,.3f} TB"


def _busy(run: Run) -> str:
    return f"{run.most_master_busy:.1%} of the time{', which it has not' if run.most_master_busy > 1 else ''}"
