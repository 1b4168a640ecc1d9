#!/usr/bin/env python3
"""Minutes of load on two engines whose pool node is killed, frozen and started again at random moments.

Every answer is compared, token by token, with that of an engine without a connector; no request may fail or hang; and
when the load is over, the engines have all their blocks back and the pool holds nothing for anybody.  The first engine
keeps prefixes itself and has so few blocks that it preempts requests, the second keeps none; the steps of both overlap.

Run it with the project's interpreter: ``python scripts/chaos.py [--minutes 10] [--seed 0] [--help]``.  Progress goes to
stderr, the result to stdout; the exit status is 1 when anything was found, 2 when the usage was wrong.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

if __package__ in (None, ""):  # run as a program
    sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.chaos_load import Load, Tally, faults
from scripts.chaos_runner import (
    OPTIONS,
    Engine,
    Reference,
    Runner,
    conduct,
    connected_server,
    engine_holds,
    expect_nothing,
    parser_of,
    plain_server,
    pool_holds,
    running,
    say,
)
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.node import NodeProcess
from tests.kit.tiny_model import Size, make_model

MODELS: dict[Size, EngineOptions] = {
    "test": OPTIONS,
    "mha": OPTIONS,
    "hybrid": msgspec.structs.replace(OPTIONS, gpu_blocks=150),
    "mla": msgspec.structs.replace(
        OPTIONS, block_size=16, gpu_blocks=180, dtype="float32", arguments=("--attention-backend", "CPU_MLA")
    ),
}
"""Latent attention in bfloat16 has two texts for some prompts, computed or kept, without any connector."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return the exit status."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--model", choices=list(MODELS), default="test", help="layout of the KV (default test: GQA)")
    options = parser.parse_args(arguments)
    return conduct(options, partial(run, options))


def run(options: Any, folder: Path) -> tuple[Tally, dict[str, Any]]:
    """Start everything, make load and faults, wait for rest, look what is left."""
    directory = make_model(folder / "model", options.model)
    with NodeProcess("--size", "256MB") as node:
        plain, *servers = _servers(directory, MODELS[options.model], node, folder)
        engines = [Engine(server) for server in servers]
        with running([Engine(plain), *engines]):
            say(f"two engines, one without a connector, one node; {options.minutes:g} minutes, seed {options.seed}")
            tally = Tally()
            runner = Runner(tally, engines, Reference(plain, options.deadline), options.deadline)
            breaker = Breaker(node, tally)
            with breaker.breaking(options.seed):
                runner.run(Load(options.seed), options.minutes * 60, options.clients)
            node_up = node.returncode is None
            if not node_up:
                tally.violations.append(f"the node ended by itself with status {node.returncode}")
            figures = _look_after(tally, engines, node) if node_up else {}
            runner.compare(folder / "differences.jsonl")
            return tally, figures


def _servers(model: Path, options: EngineOptions, node: NodeProcess, folder: Path) -> list[VllmServer]:
    """One without a connector, one with a small cache of prefixes, one without."""
    extra: list[dict[str, object]] = [
        {"health_check_ms": 500},  # a node that is back is used again after seconds
        {"health_gate": False},  # or with the next request
    ]
    connected = [
        connected_server(
            model,
            msgspec.structs.replace(options, prefix_caching=number == 0),
            node,
            folder / f"server-{number}.log",
            **extra[number],
        )
        for number in range(2)
    ]
    return [plain_server(model, options, folder), *connected]


class Breaker:
    """Kills and freezes the node from a thread of its own, and always brings it back."""

    def __init__(self, node: NodeProcess, tally: Tally) -> None:
        self._node = node
        self._tally = tally
        self._over = threading.Event()

    @contextmanager
    def breaking(self, seed: int) -> Iterator[None]:
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(self._work, seed)
            try:
                yield
            finally:
                self._over.set()
                working.result()

    def _work(self, seed: int) -> None:
        for fault in faults(seed):
            if self._over.wait(fault.after):
                return
            if self._node.returncode is not None:  # it ended by itself, which is found later
                return
            self._tally.faults[fault.kind] += 1
            if fault.kind == "kill":
                self._node.kill()
                self._over.wait(fault.lasts)
                self._node.start()
            else:
                self._node.send(signal.SIGSTOP)
                self._over.wait(fault.lasts)
                self._node.send(signal.SIGCONT)


def _look_after(tally: Tally, engines: Sequence[Engine], node: NodeProcess) -> dict[str, Any]:
    """Wait for rest; what is not free then is a violation.  Returns what the engines counted."""
    for number, engine in enumerate(engines):
        expect_nothing(tally, f"server {number}", engine_holds(engine))
    expect_nothing(tally, "pool", pool_holds(node))
    metrics = [engine.metrics() for engine in engines]
    hits = sum(each.get("vllm:external_prefix_cache_hits_total", 0) for each in metrics)
    if not hits:
        tally.violations.append("no token came from the pool, so this run shows nothing")
    return {
        "tokens_from_pool": int(hits),
        "preemptions": int(sum(each["vllm:num_preemptions_total"] for each in metrics)),
        "prompt_tokens": int(sum(each["vllm:prompt_tokens_total"] for each in metrics)),
    }


if __name__ == "__main__":
    sys.exit(main())
