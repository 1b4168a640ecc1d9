#!/usr/bin/env python3
"""Hurts pools on purpose: runs many generated histories of faults and looks that nothing happens that must not.

Each history is a node on real files with three clients, in virtual time: pages are stored, loaded and evicted, clients
vanish and go on writing, the node is killed between any two of its writes or in the middle of one, stopped, handed
over, memory is full, clocks jump, bits flip in pages, headers, descriptions and files. Most have tiers below, whose
places fail, lie, tear, hang and are full, whose threads work in any order, too late or never, and into which others
write; some have tenants with quotas and keys that change; in all of them an administrator clears, drains, resizes,
warms, pins and looks (see ``tests.faults``).

    scripts/histories.py --count 10000 --seed 0

prints what was covered, and fails when something of it never came about. A history that fails is shrunk and printed
with its seed; ``--only SEED`` runs it again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.faults.covered import uncovered
from tests.faults.history import History, Report, generate, run, shrink

BATCH = 25
"""Histories that a process runs at a time."""


SECONDS = 60
"""How long a history may take; most take a thirtieth of a second."""


class Endless(BaseException):
    """A history does not end."""


def _give_up(*_: object) -> None:
    raise Endless


def run_batch(seeds: list[int]) -> tuple[Report, list[tuple[int, str]]]:
    """What came of the histories of ``seeds``, and which of them failed how."""
    total, failed = Report(), []
    signal.signal(signal.SIGALRM, _give_up)
    for seed in seeds:
        signal.alarm(SECONDS)
        try:
            report = run(generate(seed))
        except Endless:
            report = Report(1, violation=f"it does not end within {SECONDS} s")
        finally:
            signal.alarm(0)
        if report.violation is not None:
            failed.append((seed, report.violation))
        total.add(report)
    return total, failed


def shortest(seed: int) -> tuple[History, str]:
    """The history of a seed that failed without what does not matter, and how it fails."""
    short = shrink(generate(seed), lambda history: run(history).violation is not None)
    return short, run(short).violation or "it did not fail again"


def table(report: Report) -> Iterator[str]:
    """What was covered, a line each."""
    groups = {
        "steps": report.steps,
        "writes of nodes": report.writes,
        "nodes killed at a write": report.killed_at,
        "what happened": report.events,
    }
    yield f"histories: {report.histories}"
    for title, counts in groups.items():
        yield f"{title}: {sum(counts.values()) if title != 'what happened' else ''}".rstrip(" :")
        for name, count in Counter(counts).most_common():
            yield f"  {name:<32} {count:>9}"


def main() -> int:
    """Run what the flags ask for; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description="Run generated histories of faults against the pool.")
    parser.add_argument("--count", type=int, default=10_000, help="histories to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history; the others follow")
    parser.add_argument("--only", type=int, help="run the history of this seed alone and say what it is")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that run them")
    options = parser.parse_args()
    if options.only is not None:
        return _only(options.only)
    seeds = range(options.seed, options.seed + options.count)
    batches = [list(seeds[start : start + BATCH]) for start in range(0, len(seeds), BATCH)]
    total, failed, begin = Report(), [], time.monotonic()
    with ProcessPoolExecutor(options.workers) as pool:
        for done in as_completed([pool.submit(run_batch, batch) for batch in batches]):
            report, failures = done.result()
            total.add(report)
            failed += failures
            print(
                f"\r{total.histories} of {len(seeds)} histories, {len(failed)} failed",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(f" in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    print("\n".join(table(total)))
    for seed, violation in sorted(failed):
        print(f"seed {seed} failed: {violation}")
    never = uncovered(total.histories, total.steps, total.events, total.killed_at)
    for one in never:
        print(f"never came about: {one}")
    if failed:
        _only(min(failed)[0])
    return 1 if failed or never else 0


def _only(seed: int) -> int:
    if run(generate(seed)).violation is None:
        print(f"the history of seed {seed} does not fail")
        return 0
    short, violation = shortest(seed)
    print(f"the history of seed {seed} in short, which fails with: {violation}")
    settings = {name: getattr(short, name) for name in short.__struct_fields__ if name != "steps"}
    print("  " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    for step in short.steps:
        print(f"  {step}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
