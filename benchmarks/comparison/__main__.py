"""The comparison itself, run by ``benchmarks/peers.py`` in the environment in which the peers are installed."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from benchmarks.comparison.contenders import CONTENDERS, INSTALL, Contender
from benchmarks.comparison.procedure import (
    Bench,
    Findings,
    Sizes,
    ThreeSteps,
    Turns,
    by_turns,
    findings,
    in_three_steps,
)
from benchmarks.comparison.report import Entry, Report, notes, table, verdict_table, verdicts
from ems.bench.ttft_report import Latency
from ems.errors import EmsError
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.tiny_model import make_model

BLOCK = 128
START_SECONDS = 600.0
"""Until an engine answers, on a machine that has much else to do."""


def options(sizes: Sizes) -> EngineOptions:
    """Engines whose own prefix cache holds what runs at once and little more, so that B evicts A."""
    longest = max(*sizes.inputs, sizes.cold_tokens) + sizes.output_tokens
    running = sizes.concurrency * -(-longest // BLOCK)
    prefix = -(-(sizes.prefix_tokens + sizes.new_tokens) // BLOCK)
    longest_served = EngineOptions().max_model_len // BLOCK + 1  # vLLM starts with no fewer; one of them is its own
    blocks = max(running + prefix + 8, longest_served)
    return EngineOptions(prefix_caching=True, block_size=BLOCK, gpu_blocks=blocks)


class Calls(msgspec.Struct):
    """The part of what ``scheduler_calls.py`` prints that is shown here."""

    calls: dict[str, Latency]


class Comparison:
    """Runs the contenders one after another, each beside an engine without a pool.

    Two engines that were started alike differ by more than what is looked for here, so all but the three steps is
    measured in ``lives`` lives of both.
    """

    def __init__(self, folder: Path, sizes: Sizes, pool_gib: int, lives: int) -> None:
        self._folder = folder
        self._sizes = sizes
        self._pool_gib = pool_gib
        self._lives = lives
        self._model = make_model(folder / "model", "demo")

    def run(self, names: list[str]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for name in names:
            entries[name] = self._enter(name)
            # What was found survives what may yet happen.
            (self._folder / "entries.json").write_bytes(msgspec.json.encode(entries))
        return entries

    def _enter(self, name: str) -> Entry:
        kind = CONTENDERS[name]
        version = kind.version()
        if version is None:
            return Entry(title=kind.name, absent=f"it is not installed, {INSTALL} does that")
        title = f"{kind.name} {version}".strip()
        try:
            return Entry(title=title, findings=self._examine(kind))
        except (EmsError, TimeoutError) as error:
            say(f"{kind.name} failed: {error}")
            return Entry(title=title, absent=f"it failed: {error}")

    def _examine(self, kind: type[Contender]) -> Findings:
        turns = Turns()
        steps: list[ThreeSteps] = []
        memory = 0
        for life in range(self._lives):
            with ExitStack() as stack:
                bench = self._bench(stack, kind(self._folder, self._pool_gib), life)
                if bench.second is not None:
                    steps, memory = asyncio.run(in_three_steps(bench))
                turns.add(asyncio.run(by_turns(bench)))
        return findings(steps, memory, turns)

    def _bench(self, stack: ExitStack, contender: Contender, life: int) -> Bench:
        def tell(what: str) -> None:
            say(f"{contender.name}, life {life + 1} of {self._lives}: {what}")

        tell("starting")
        contender.start(stack)
        groups = [(Contender(self._folder, self._pool_gib), [0]), (contender, [1] if life else [1, 2])]
        if life % 2:
            # Who starts later may get worse memory for as long as it lives.
            groups.reverse()
        engines: dict[int, VllmServer] = {}
        for kind, numbers in groups:
            engines |= zip(numbers, self._start(stack, kind, numbers), strict=True)
        return Bench(engines[1], engines.get(2), engines[0], contender.processes, contender.pooled, self._sizes, tell)

    def _start(self, stack: ExitStack, contender: Contender, numbers: list[int]) -> list[VllmServer]:
        """Start engines at the same time; ``stack`` stops them."""
        engines = [self._engine(contender, number) for number in numbers]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_ready(START_SECONDS)
        return engines

    def _engine(self, contender: Contender, number: int) -> VllmServer:
        return VllmServer(
            self._model,
            log=self._folder / contender.name.lower().replace(" ", "-") / f"engine-{number}.log",
            kv_transfer_config=contender.transfer_config(),
            options=options(self._sizes),
            environment={"VLLM_SERVER_DEV_MODE": "1", **contender.environment()},
        )


def scheduler_calls() -> dict[str, Latency]:
    """What ``benchmarks/scheduler_calls.py`` measures; nothing when it fails."""
    command = [sys.executable, str(Path(__file__).parent.parent / "scheduler_calls.py"), "-o", "json"]
    outcome = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        return msgspec.json.decode(outcome.stdout, type=Calls).calls
    except msgspec.DecodeError:
        say("scheduler_calls.py failed, its figures are left out")
        return {}


def say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def machine() -> str:
    gib = psutil.virtual_memory().total >> 30
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {gib} GiB, load {load:.1f} at the start, Python {platform.python_version()}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/peers.py", description=__doc__)
    names = ",".join(CONTENDERS)
    parser.add_argument("--contenders", default=names, help=f"which ones, default {names}")
    parser.add_argument("--requests", type=int, default=100, help="prompts of a set in the three steps")
    parser.add_argument("--concurrency", type=int, default=25, help="requests under way at the same time there")
    parser.add_argument("--pairs", type=int, default=20, help="pairs in the comparisons by turns, in each life")
    parser.add_argument("--waves", type=int, default=6, help="pairs of waves of cold requests, in each life")
    parser.add_argument("--lives", type=int, default=2, help="starts of each engine for all that is done by turns")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts")
    parser.add_argument("--pool-gib", type=int, default=6, help="memory of each pool in GiB")
    parser.add_argument("--folder", type=Path, default=Path(".run/peers"), help="model, logs, entries.json")
    parser.add_argument("--no-scheduler-calls", action="store_true", help="leave out benchmarks/scheduler_calls.py")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    arguments.contenders = arguments.contenders.split(",")
    for name in arguments.contenders:
        if name not in CONTENDERS:
            parser.error(f"--contenders has {name!r}, expected some of {names} separated by commas")
    for name in ("requests", "concurrency", "pairs", "waves", "lives", "pool_gib"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected 1 or more")
    return arguments


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = Sizes(
        requests=arguments.requests,
        concurrency=arguments.concurrency,
        pairs=arguments.pairs,
        waves=arguments.waves,
        seed=arguments.seed,
    )
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    try:
        entries = Comparison(folder, sizes, arguments.pool_gib, arguments.lives).run(arguments.contenders)
    except EmsError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    calls = scheduler_calls() if "ems" in entries and not arguments.no_scheduler_calls else {}
    report = Report(sizes=sizes, pool_gib=arguments.pool_gib, machine=where, entries=entries, scheduler_calls=calls)
    report = msgspec.structs.replace(report, verdicts=verdicts(report))
    if arguments.output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        console = Console(width=max(Console().width, 150))
        console.print(table(report))
        console.print(verdict_table(report.verdicts))
        for note in notes(report):
            console.print(note)
    return 0 if all(entry.findings for entry in entries.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
