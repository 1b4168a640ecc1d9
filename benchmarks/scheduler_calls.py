#!/usr/bin/env python3
"""How long a real engine's scheduler is held up by the connector: each call into it is timed, for long prompts.

vLLM's own scheduler with both halves of the connector in this process, as with tensor parallel size 1 in production:
the connector's threads share the scheduler's interpreter, so what lookups and copies cost it is in the figures.  In
place of a model there is a pause; requests, blocks, hashes, loads and saves are real.  32 K tokens in blocks of 16 are
2,048 blocks a request.

"CPU" is the time that the calling thread itself ran.  What is missing to the whole it spent waiting: for the
interpreter, which another thread of the connector held, or for a core.  Questions of a step that computes nothing stand
in a line of their own: there the connector waits a moment for lookups, and nothing that runs waits with it.

With ``--waiting 10000`` it measures something else: how long ``schedule()`` itself takes while so many requests wait
whose lookups are not answered, because the pool's node is stopped.  Beside it stands the same scheduler with a
connector that only ever says "ask again": what vLLM's own walk through its queue costs.

Without it each prompt is computed and stored, then the engine's own prefix cache is emptied, and all come again as hits
of the pool, several times.  Run it with the project's interpreter: ``python benchmarks/scheduler_calls.py [--help]``.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ems.bench.ttft_report import Latency, summarise
from tests.kit.node import NodeProcess
from tests.kit.process import free_port
from tests.kit.tiny_model import make_model
from tests.kit.tiny_weights import ModelShape

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)
MATCH = "get_num_new_matched_tokens"
MATCH_IDLE = f"{MATCH}, nothing runs"
SHAPE = ModelShape(
    layers=2, hidden_size=64, intermediate_size=64, kv_heads=1, head_dim=64, near=64, far=256, max_positions=1 << 17
)
TARGET_SECONDS = 0.001
IDLE_SECONDS = 0.02
"""The same for a question of a step that computes nothing."""
WAITING_SECONDS = 0.002
WAITING_STEPS = 50
WAITING_TOKENS = 64
"""Of each waiting request; an engine that finds nothing of its own looks at one block, however long it is."""
FORGET_SECONDS = 60.0
LAYOUT = "LBHNC"
"""Of the KV tensors below: one a layer, heads before tokens in a block."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Times of each call in seconds, and what the engine did meanwhile."""

    prompt_tokens: int
    block_size: int
    requests: int
    hit_tokens: int
    """Tokens that the pool gave; the rest was computed."""
    calls: dict[str, Latency]
    cpu: dict[str, Latency]
    """The same calls: what the calling thread itself ran."""

    @property
    def met(self) -> bool:
        most = {MATCH_IDLE: IDLE_SECONDS}
        return all(latency.p99 <= most.get(name, TARGET_SECONDS) for name, latency in self.calls.items())


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Times of ``schedule()`` in seconds while many requests wait for their lookups."""

    waiting: int
    steps: int
    ems: Latency
    """CPU time of the scheduler's thread."""
    says_ask_again: Latency
    """The same with a connector that does nothing but say so."""

    @property
    def met(self) -> bool:
        return self.ems.p99 <= WAITING_SECONDS


class Stopwatch:
    """Stands between scheduler and connector and notes how long each call takes."""

    def __init__(self, connector: Any) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.idle = False
        """Whether the engine computed nothing when the step began."""
        for name in CALLS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            began, ran = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                line = MATCH_IDLE if self.idle and name == MATCH else name
                self.seconds.setdefault(line, []).append(time.perf_counter() - began)
                self.cpu_seconds.setdefault(line, []).append(time.thread_time() - ran)

        return timed

    def clear(self) -> None:
        for samples in (*self.seconds.values(), *self.cpu_seconds.values()):
            samples.clear()


class Engine:
    """A vLLM scheduler with the connector's two halves, and in place of a model a pause for each step.

    The halves share this interpreter, as they do in an engine with tensor parallel size 1.
    """

    def __init__(self, model: Path, node: NodeProcess, arguments: argparse.Namespace) -> None:
        config = _engine_config(model, node, arguments)
        self._vllm_config = config
        self._pause = arguments.step_ms / 1e3
        kv_cache_config = _cache_config(config, arguments)
        self._scheduler = _scheduler(config, kv_cache_config)
        self._worker = _worker(config, kv_cache_config)
        self._new_request = _request_maker(config, kv_cache_config, arguments.output_tokens)
        self.stopwatch = Stopwatch(self._scheduler.connector)
        self.hit_tokens = 0
        self._sent = 0
        self._scheduled = 0.0

    def run(self, prompts: list[list[int]]) -> None:
        """Send all prompts and step until each has its answer."""
        for prompt in prompts:
            self._sent += 1
            self._scheduler.add_request(self._new_request(str(self._sent), prompt))
        while self._scheduler.has_requests():
            self._step()

    def _step(self) -> None:
        self.stopwatch.idle = not self._scheduler.running
        output = self._scheduler.schedule()
        self._scheduled = time.thread_time()
        worker, step = self._worker, output.kv_connector_metadata
        worker.handle_preemptions(step)
        worker.bind_connector_metadata(step)
        worker.start_load_kv(None)
        time.sleep(self._pause)  # the forward pass: leaves the interpreter to the connector's threads
        worker.wait_for_save()
        results = self._results(output)
        worker.clear_connector_metadata()
        self.hit_tokens += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        self._scheduler.update_from_output(output, results)

    def _results(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker = self._worker
        ends = worker.get_transfer_results(output.finished_req_ids)
        transfers = KVConnectorOutput(
            finished_sending=ends.finished_sending,
            finished_recving=ends.finished_recving,
            failed_recving=ends.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        scheduled = list(output.num_scheduled_tokens)
        sampled = [[42] if self._samples(name) else [] for name in scheduled]
        order = {name: position for position, name in enumerate(scheduled)}
        return ModelRunnerOutput(
            req_ids=scheduled, req_id_to_index=order, sampled_token_ids=sampled, kv_connector_output=transfers
        )

    def _samples(self, request_id: str) -> bool:
        """Whether the request's prompt is computed to its end, so that the step gives a token."""
        request = self._scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def wait(self, waiting: int, steps: int, source: random.Random) -> list[float]:
        """CPU seconds of calls of ``schedule()`` while one request runs and so many wait; these are gone then."""
        from vllm.v1.request import RequestStatus

        names = []
        for _ in range(waiting):
            self._sent += 1
            names.append(str(self._sent))
            prompt = source.choices(range(300, 1000), k=WAITING_TOKENS)
            self._scheduler.add_request(self._new_request(names[-1], prompt))
        took = []
        for _ in range(steps):
            began = time.thread_time()
            self._step()
            took.append(self._scheduled - began)
        if len(self._scheduler.running) != 1:
            raise SystemExit("error: requests were computed that should have waited")
        self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        return took

    def begin(self, prompt: list[int]) -> None:
        """Have one request that runs: an engine with nothing to compute waits a moment for a lookup."""
        self._scheduler.add_request(self._new_request("runs", prompt))
        while not self._scheduler.running:
            self._step()

    @contextmanager
    def asked_again(self) -> Iterator[None]:
        """Meanwhile the connector says "ask again" for every request, and nothing else."""
        connector = self._scheduler.connector
        real = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = lambda _request, _local: (None, False)
        try:
            yield
        finally:
            connector.get_num_new_matched_tokens = real

    def forget(self) -> None:
        """Empty the engine's own prefix cache; what is still being stored holds it up."""
        deadline = time.monotonic() + FORGET_SECONDS
        while not self._scheduler.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise SystemExit(f"error: blocks are still held {FORGET_SECONDS:.0f} s after the last request")
            self._step()

    def close(self) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()


def _engine_config(model: Path, node: NodeProcess, arguments: argparse.Namespace) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # A lookup that nobody answers is waited for.
    patience = {"lookup_timeout_ms": 600_000, "call_timeout_ms": 600_000, "health_gate": False}
    patience = patience if arguments.waiting else {}
    transfer = KVTransferConfig(
        kv_connector="EmsStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"socket": str(node.socket), "autostart": False, **patience},
    )
    return EngineArgs(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=arguments.block_size,
        max_model_len=_blocks(arguments) * arguments.block_size,
        max_num_batched_tokens=arguments.batched_tokens,
        max_num_seqs=arguments.at_once,
        num_gpu_blocks_override=_blocks(arguments) * arguments.at_once + 8,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    ).create_engine_config()


def _blocks(arguments: argparse.Namespace) -> int:
    """Blocks of one request."""
    return int(-(-(arguments.tokens + arguments.output_tokens) // arguments.block_size) + 1)


def _cache_config(config: Any, arguments: argparse.Namespace) -> Any:
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=arguments.block_size, num_kv_heads=SHAPE.kv_heads, head_size=SHAPE.head_dim, dtype=torch.bfloat16
    )
    specs = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(SHAPE.layers)}
    config.cache_config.kv_cache_layout = LAYOUT
    (cache,) = get_kv_cache_configs(config, [specs], [1 << 34])
    cache.kv_cache_layout = LAYOUT
    config.cache_config.num_gpu_blocks = cache.num_blocks
    cache.hash_block_size = resolve_kv_cache_block_sizes(cache, config)[1]
    return cache


def _scheduler(config: Any, cache: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler_block, hash_block = resolve_kv_cache_block_sizes(cache, config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_block,
        hash_block_size=hash_block,
    )


def _worker(config: Any, cache: Any) -> Any:
    """The connector's other half, with KV tensors as the CPU engine makes them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(config):  # the connector asks which rank it is
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
    group = cache.kv_cache_groups[0]
    shape = (cache.num_blocks, SHAPE.kv_heads, group.kv_cache_spec.block_size, 2 * SHAPE.head_dim)
    worker.register_kv_caches({name: torch.zeros(shape, dtype=torch.bfloat16) for name in group.layer_names})
    return worker


def _request_maker(config: Any, cache: Any, output_tokens: int) -> Callable[[str, list[int]], Any]:
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(cache.hash_block_size, hash_function)
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)

    def new_request(name: str, prompt: list[int]) -> Any:
        return Request(name, prompt, sampling, None, block_hasher=hasher)

    return new_request


def measure(arguments: argparse.Namespace, engine: Engine) -> Report:
    source = random.Random(arguments.seed)
    ids = range(300, 1000)
    warm_up = [source.choices(ids, k=arguments.tokens)]
    prompts = [source.choices(ids, k=arguments.tokens) for _ in range(arguments.prompts)]
    for _ in range(2):
        engine.run(warm_up)
        engine.forget()
    engine.stopwatch.clear()
    engine.hit_tokens = 0
    for number in range(1 + arguments.repeats):
        say(f"{len(prompts)} prompts of {arguments.tokens:,} tokens, {'hits of the pool' if number else 'computed'}")
        engine.run(prompts)
        engine.forget()
    return Report(
        prompt_tokens=arguments.tokens,
        block_size=arguments.block_size,
        requests=arguments.prompts * (1 + arguments.repeats),
        hit_tokens=engine.hit_tokens,
        calls=_summaries(engine.stopwatch.seconds),
        cpu=_summaries(engine.stopwatch.cpu_seconds),
    )


def measure_waiting(arguments: argparse.Namespace, engine: Engine, node: NodeProcess) -> Waiting:
    source = random.Random(arguments.seed)
    say(f"{arguments.waiting:,} requests wait, {WAITING_STEPS} steps each way")
    engine.begin(source.choices(range(300, 1000), k=WAITING_TOKENS))
    node.send(signal.SIGSTOP)
    try:
        with engine.asked_again():
            alone = engine.wait(arguments.waiting, WAITING_STEPS, source)
        ours = engine.wait(arguments.waiting, WAITING_STEPS, source)
    finally:
        node.send(signal.SIGCONT)
    return Waiting(waiting=arguments.waiting, steps=WAITING_STEPS, ems=summarise(ours), says_ask_again=summarise(alone))


def waiting_table(report: Waiting) -> Table:
    title = f"CPU time of schedule() while {report.waiting:,} requests wait for their lookups, {report.steps} steps"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("connector", "p50 µs", "p99 µs", "most µs", "of vLLM's own"):
        result.add_column(heading, justify="left" if heading == "connector" else "right", no_wrap=True)
    for name, latency in (('says "ask again"', report.says_ask_again), ("EMS", report.ems)):
        figures = (latency.p50, latency.p99, latency.most)
        ratio = latency.p50 / report.says_ask_again.p50
        result.add_row(name, *(f"{1e6 * figure:,.0f}" for figure in figures), f"{ratio:.2f}")
    return result


def _summaries(samples: dict[str, list[float]]) -> dict[str, Latency]:
    return {name: summarise(times) for name, times in samples.items() if times}


def table(report: Report) -> Table:
    title = f"Calls of the scheduler into the connector: {report.requests} requests of {report.prompt_tokens:,} tokens"
    title += f" in blocks of {report.block_size}, {report.hit_tokens:,} tokens from the pool"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("call", "calls", "p50 µs", "p99 µs", "most µs", "CPU p50 µs", "CPU p99 µs"):
        result.add_column(heading, justify="left" if heading == "call" else "right", no_wrap=True)
    for name, latency in report.calls.items():
        figures = (latency.p50, latency.p99, latency.most, report.cpu[name].p50, report.cpu[name].p99)
        result.add_row(name, f"{latency.count:,}", *(f"{1e6 * figure:,.0f}" for figure in figures))
    return result


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@contextmanager
def setting(arguments: argparse.Namespace) -> Iterator[tuple[Engine, NodeProcess]]:
    os.environ.update(ENVIRONMENT)
    logging.captureWarnings(True)
    with TemporaryDirectory(prefix="ems-scheduler-calls-") as scratch, NodeProcess("--size", "2GiB") as node:
        node.wait_touched()
        say("starting the engine")
        engine = Engine(make_model(Path(scratch) / "model", SHAPE), node, arguments)
        try:
            yield engine, node
        finally:
            engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of each prompt")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12, help="different prompts")
    parser.add_argument("--repeats", type=int, default=9, help="how often all come again as hits of the pool")
    parser.add_argument("--at-once", type=int, default=4, help="requests that run at the same time")
    parser.add_argument("--output-tokens", type=int, default=40, help="length of each answer")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--step-ms", type=float, default=20, help="pause in place of the forward pass")
    parser.add_argument("--waiting", type=int, default=0, help="measure schedule() while so many requests wait")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    if arguments.waiting:
        arguments.output_tokens = 4 * WAITING_STEPS
    with setting(arguments) as (engine, node):
        report = measure_waiting(arguments, engine, node) if arguments.waiting else measure(arguments, engine)
    if arguments.output == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        Console(width=120).print(waiting_table(report) if isinstance(report, Waiting) else table(report))
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main())
