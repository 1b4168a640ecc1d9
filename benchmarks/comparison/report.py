"""What comes out of the comparison: one table, targets met or missed, JSON.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.comparison.pairs import Comparison
from benchmarks.comparison.procedure import Findings, Sizes
from ems.bench.ttft_report import Latency

MIB = 1 << 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One contender: what was found, or why nothing was."""

    title: str
    findings: Findings | None = None
    absent: str | None = None
    """Why it did not take part, and what to do about it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One target, and what was measured."""

    target: str
    measured: str
    met: bool
    open: bool = False
    """It was not met, but lies within what the pairs leave possible: more of them would tell."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison; ``entries`` by the contenders' short names."""

    sizes: Sizes
    pool_gib: int
    machine: str
    entries: dict[str, Entry]
    scheduler_calls: dict[str, Latency] = {}
    """Calls of the engine's scheduler into the connector of EMS, with prompts of 32 K tokens in blocks of 16."""
    verdicts: list[Verdict] = []


# --------------------------------------------------------------------------------------------------------------- table


def table(report: Report) -> Table:
    """Return one column a contender, one row a figure."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=_title(report), title_justify="left")
    result.add_column("", no_wrap=True)
    for entry in report.entries.values():
        result.add_column(entry.title, justify="right", no_wrap=True)
    found = {name: entry.findings for name, entry in report.entries.items()}
    for label, cells in _rows(report, found):
        result.add_row(label, *(cells.get(name, "-") for name in report.entries), end_section=not cells)
    return result


def _title(report: Report) -> str:
    sizes = report.sizes
    steps = f"three steps: {sizes.requests} requests, {sizes.concurrency} at once, {sizes.output_tokens} tokens out"
    return f"{steps}; pairs: {sizes.pairs}; pool {report.pool_gib} GiB; {report.machine}"


Cells = dict[str, str]


def _rows(report: Report, found: Mapping[str, Findings | None]) -> list[tuple[str, Cells]]:
    present = {name: one for name, one in found.items() if one is not None}
    rows: list[tuple[str, Cells]] = []
    for index, tokens in enumerate(report.sizes.inputs):
        for step in range(3):
            label = f"{tokens:,} tokens, TTFT step {step + 1}, mean ms"
            rows.append((label, {name: _ttft(present, name, index, step) for name in present}))
        for step in range(3):
            label = f"{tokens:,} tokens, CPU s a request, step {step + 1}"
            cells = {name: f"{one.three_steps[index].cpu_seconds[step]:.3f}" for name, one in present.items()}
            rows.append((label, cells))
        for step in (1, 2):
            label = f"{tokens:,} tokens, same text as in step 1, step {step + 1}"
            cells = {name: str(one.three_steps[index].steps[step].same_text) for name, one in present.items()}
            rows.append((label, cells))
    prefix = f"hit on {report.sizes.prefix_tokens:,}"
    rows += [
        ("cold TTFT, ratio to no pool", {name: _ratio(one.cold) for name, one in present.items()}),
        (
            f"cold TTFT, {report.sizes.concurrency} at once, ratio",
            {name: _ratio(one.waves) for name, one in present.items()},
        ),
        ("further tokens while saving, ratio", {name: _ratio(one.decode) for name, one in present.items()}),
        (f"{prefix}, engine's own cache, ms", {name: _beside(one.warm.own) for name, one in present.items()}),
        (f"{prefix}, pool, ms", {name: _beside(one.warm.pool) for name, one in present.items() if one.warm.pool}),
        (
            f"{prefix}, pool beside the same engine's own cache, ms",
            {name: _beside(one.warm.pool_above_own) for name, one in present.items() if one.warm.pool_above_own},
        ),
        ("memory of all processes, MiB", {name: f"{one.memory / MIB:,.0f}" for name, one in present.items()}),
        ("the same beyond no pool, MiB a prompt kept", _memory_a_prompt(report.sizes, present)),
    ]
    return rows


def _memory_a_prompt(sizes: Sizes, present: Mapping[str, Findings]) -> Cells:
    base = present.get("none")
    if base is None:
        return {}
    kept = 2 * sizes.requests * len(sizes.inputs)
    more = {name: one.memory - base.memory for name, one in present.items() if name != "none"}
    return {name: f"{value / MIB / kept:,.1f}" for name, value in more.items()}


def _ttft(present: Mapping[str, Findings], name: str, index: int, step: int) -> str:
    mean = present[name].three_steps[index].steps[step].ttft.mean
    base = present.get("none")
    against = f" ({base.three_steps[index].steps[step].ttft.mean / mean:.2f} x)" if base and name != "none" else ""
    return f"{mean * 1e3:,.0f}{against}"


def _ratio(one: Comparison) -> str:
    return f"{one.ratio:.3f} ({one.ratio_low:.3f}-{one.ratio_high:.3f})"


def _beside(one: Comparison | None) -> str:
    return "-" if one is None else f"{one.other * 1e3:.1f} ({one.difference * 1e3:+.1f})"


def notes(report: Report) -> list[str]:
    """What a reader of the table must know: who did not take part and why."""
    return [f"{entry.title} is left out: {entry.absent}" for entry in report.entries.values() if entry.absent]


# ------------------------------------------------------------------------------------------------------------- targets

COLD = 1.01
DECODE = 1.02
WARM_SECONDS = 0.010
CALL_SECONDS = 0.001
PART_OF_A_BLOCK = 2.5
"""How much faster EMS is than the others where a prompt does not end with a block."""
BLOCK = 128


def verdicts(report: Report) -> list[Verdict]:
    """Compare EMS with what it is to reach; targets whose figures were not measured are left out."""
    found = {name: entry.findings for name, entry in report.entries.items() if entry.findings is not None}
    ems = found.get("ems")
    if ems is None:
        return []
    peers = {name: one for name, one in found.items() if name not in ("none", "ems")}
    result = []
    for index, tokens in enumerate(report.sizes.inputs):
        if peers:
            result += [_later_step(tokens, ems, peers, index, step) for step in (1, 2)]
    return result + _by_turns(ems, report.sizes) + _calls(report)


def _mean(one: Findings, index: int, step: int) -> float:
    return one.three_steps[index].steps[step].ttft.mean


def _later_step(tokens: int, ems: Findings, peers: Mapping[str, Findings], index: int, step: int) -> Verdict:
    best = min(_mean(one, index, step) for one in peers.values())
    factor = best / _mean(ems, index, step)
    wanted = PART_OF_A_BLOCK if tokens % BLOCK else 1.0
    what = f"{wanted} x as fast as the better peer" if wanted > 1 else "no slower than the better peer"
    target = f"{tokens:,} tokens, step {step + 1}: {what}"
    return Verdict(target=target, measured=f"{factor:.2f} x as fast", met=factor >= wanted)


def _by_turns(ems: Findings, sizes: Sizes) -> list[Verdict]:
    at_once = f"step 1 by turns, {sizes.concurrency} at once: at most {COLD} x no pool"
    result = [
        _at_most(f"cold TTFT: at most {COLD} x", ems.cold, COLD),
        _at_most(at_once, ems.waves, COLD),
        _at_most(f"further tokens while saving: at most {DECODE} x", ems.decode, DECODE),
    ]
    most = f"hit on {sizes.prefix_tokens:,} tokens: at most {WARM_SECONDS * 1e3:.0f} ms above"
    for one, cache in (
        (ems.warm.pool_above_own, "the same engine's own cache"),
        (ems.warm.pool, "the own cache of an engine without a pool"),
    ):
        if one is not None:
            more, least = one.difference, one.difference_low
            measured = f"{more * 1e3:+.1f} ms ({least * 1e3:+.1f} to {one.difference_high * 1e3:+.1f})"
            result.append(
                Verdict(
                    target=f"{most} {cache}",
                    measured=measured,
                    met=more <= WARM_SECONDS,
                    open=least <= WARM_SECONDS < more,
                )
            )
    return result


def _at_most(target: str, one: Comparison, bound: float) -> Verdict:
    met = one.ratio <= bound
    return Verdict(target=target, measured=_ratio(one), met=met, open=not met and one.ratio_low <= bound)


def _calls(report: Report) -> list[Verdict]:
    if not report.scheduler_calls:
        return []
    name, slowest = max(report.scheduler_calls.items(), key=lambda item: item[1].p99)
    target = f"calls of the scheduler: p99 at most {CALL_SECONDS * 1e3:.0f} ms"
    return [Verdict(target=target, measured=f"{slowest.p99 * 1e3:.2f} ms ({name})", met=slowest.p99 <= CALL_SECONDS)]


def verdict_table(found: Sequence[Verdict]) -> Table:
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Targets of EMS", title_justify="left")
    for heading in ("target", "measured", ""):
        result.add_column(heading, no_wrap=True)
    for one in found:
        result.add_row(one.target, one.measured, "met" if one.met else "open, more pairs" if one.open else "MISSED")
    return result
