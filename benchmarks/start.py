#!/usr/bin/env python3
"""What it costs to begin: ``import ems``, the names of the SDK, a node until it listens.

    python benchmarks/start.py [--runs N] [-o json]

An engine pays for the import in each of its processes, so it is printed beside a bare interpreter and beside what it
needs of others, numpy and msgspec; a node is started with 8 MB and with 8 GB, because its memory is touched after it
listens.  Each figure is the median of ``--runs`` runs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from tests.kit.node import NodeProcess

IMPORTS = {
    "a bare interpreter": "pass",
    "import ems": "import ems",
    "numpy and msgspec": "import numpy, msgspec",
    "the names of the SDK": "from ems import CcConfig_v1, CcKvOption, Ems, EmsConfig, EmsErrorCode, EmsException",
}
"""CPU time from start to end of an interpreter that does this."""
NODES = {"a node of 8 MB": "8MB", "a node of 8 GB": "8GB"}
"""Time from start until the node's socket answers."""


def cpu_seconds(statement: str) -> float:
    """CPU seconds of a new interpreter; of one thread, because nobody waits for those that numpy starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_to_listen(size: str) -> float:
    begin = time.monotonic()
    with NodeProcess("--size", size, "--http-port", "0"):
        return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="runs of each; 7 unless told")
    parser.add_argument("-o", dest="output", choices=["text", "json"], default="text", help="how to print")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}, but at least 1 is needed for a median; write 1 or more")
    runs: dict[str, list[float]] = {what: [] for what in (*IMPORTS, *NODES)}
    for number in range(arguments.runs):
        sys.stderr.write(f"run {number + 1} of {arguments.runs}\n")
        for what, statement in IMPORTS.items():
            runs[what].append(cpu_seconds(statement))
        for what, size in NODES.items():
            runs[what].append(seconds_to_listen(size))
    seconds = {what: statistics.median(measured) for what, measured in runs.items()}
    bare, others, small = (seconds[what] for what in ("a bare interpreter", "numpy and msgspec", "a node of 8 MB"))
    against = {
        "import ems": ("of a bare interpreter", bare),
        "the names of the SDK": ("of numpy and msgspec", others),
        "a node of 8 GB": ("of a node of 8 MB", small),
    }
    ratios = {what: seconds[what] / of for what, (_, of) in against.items()}
    if arguments.output == "json":
        sys.stdout.write(json.dumps({"seconds": seconds, "ratios": ratios}) + "\n")
        return
    for what, took in seconds.items():
        beside = f"   {ratios[what]:5.2f} x that {against[what][0]}" if what in against else ""
        sys.stdout.write(f"{what:22}{took:8.3f} s{beside}\n")


if __name__ == "__main__":
    main()
