"""The whole system on this machine, in some minutes: ``make demo``.

A pool node, a prefill and a decode server (real vLLM, a small model with random weights) and the router answer one
chat, and the figures show that the decode server took the prompt's KV from the pool.  Then two servers share the pool
and the time to first token is measured in three steps.  At the end nothing is left: no process, no shared memory, no
port, whatever happened meanwhile, Ctrl-C included.  The servers' logs stay in ``.run/demo``.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console

from ems.bench.ttft import measure
from ems.bench.ttft_report import Plan, Report, table
from ems.errors import EmsError
from ems.pool.http.app import METRICS_SECONDS
from tests.kit.engine import SERVED_MODEL, EngineOptions, VllmServer
from tests.kit.process import ServerProcess, deferred_signals, free_port
from tests.kit.tiny_model import make_model

LOGS = Path(__file__).resolve().parent.parent / ".run" / "demo"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the pool lives there
PREFIX = "ems-demo-"
POOL_MIB = 512
SPARE_MIB = 64
GRACE_SECONDS = 6
OPTIONS = EngineOptions(dtype="float32")
"""Most processors compute 32-bit values several times faster than 16-bit ones."""

PLAN = Plan(requests=12, concurrency=4, input_tokens=1024, output_tokens=10, seed=1)
BLOCK_TOKENS = 128
ENGINE_BLOCKS = 48
"""The engine's own cache in the second part: less than the 12 x 8 blocks of B, so B pushes A out."""

QUESTION = (
    "A ship carries letters between nine harbours. In each harbour the master notes which letters went ashore, which "
    "came aboard, and which stayed in the hold because nobody asked for them. One winter the ledger of the third "
    "harbour is lost, and with it the order of the last forty letters. The postmaster remembers that no letter ever "
    "travelled past its own harbour, that the hold was never empty, and that the heaviest letter came aboard first. "
    "Please explain, step by step, how much of the lost order can be found again from the other eight ledgers."
)

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class DemoError(EmsError):
    """The demonstration did not show what it should."""


class Demo:
    """The parts of the demonstration, in the folder ``pool`` in shared memory."""

    def __init__(self, model: Path, pool: Path) -> None:
        self._model = model
        self._pool = pool
        self._socket = pool / "node.sock"
        self.node = self._ems("node", "--http-port", ["--dir", str(pool), "--size", f"{POOL_MIB}MiB"])
        self.started: list[ServerProcess] = []
        """Everything that ever ran, for the check at the end."""

    def chat_through_router(self) -> None:
        """Prefill on one server, decode on another, and show where the KV came from."""
        prefill = self._vllm("prefill", "kv_producer", OPTIONS)
        decode = self._vllm("decode", "kv_consumer", OPTIONS)
        hosts = ["--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1"]
        ports = ["--prefiller-ports", str(prefill.port), "--decoder-ports", str(decode.port)]
        router = self._ems("router", "--port", [*hosts, *ports])
        with self.running("a prefill server and a decode server", prefill, decode), self.running("the router", router):
            before = decode.metrics(), self.node.metrics()
            begin("asking a question through the router; with random weights the answer makes no sense")
            prompt_tokens = show_answer(router.url)
            time.sleep(METRICS_SECONDS)  # a node makes its metrics no more often
            after = decode.metrics(), self.node.metrics()
        loaded = growth(before[0], after[0], "vllm:external_prefix_cache_hits_total")
        stored = growth(before[1], after[1], "ems_pool_pages_committed_total")
        hit = growth(before[1], after[1], "ems_pool_keys_hit_total")
        out.print(f"  decode server: {loaded} of {prompt_tokens} prompt tokens came from the pool, says vLLM")
        out.print(f"  pool node:     {stored} pages stored by the prefill server, {hit} hits in lookups")
        if not (loaded and stored):
            raise DemoError("the decode server loaded nothing from the pool, expected the blocks of the prompt")

    def time_to_first_token(self) -> Report:
        """Measure the three steps on two servers that share the pool."""
        small = msgspec.structs.replace(OPTIONS, prefix_caching=True, gpu_blocks=ENGINE_BLOCKS, max_model_len=2048)
        first, second = (self._vllm(name, "kv_both", small) for name in ("server-1", "server-2"))
        with self.running("two servers that share the pool, with small caches of their own", first, second):
            begin("measuring the time to first token in three steps")
            return asyncio.run(measure((first.url, second.url), PLAN, socket=self._socket, progress=tell_pass))

    @contextmanager
    def running(self, what: str, *servers: ServerProcess) -> Iterator[None]:
        """Start servers beside each other and stop them in the end, whatever happens meanwhile."""
        begin(f"starting {what}")
        try:
            for server in servers:
                self.started.append(server)
                server.start()
            with err.status("waiting", spinner="line") as status:
                for server in servers:
                    server.wait_ready(progress=lambda seconds: status.update(f"waiting {seconds:.0f} s"))
            yield
        finally:
            with deferred_signals():
                for server in servers:
                    server.ask_to_stop()
                for server in servers:
                    server.stop(GRACE_SECONDS)

    def _vllm(self, name: str, role: str, options: EngineOptions) -> VllmServer:
        return VllmServer(
            self._model,
            log=LOGS / f"{name}.log",
            kv_transfer_config={"kv_connector": "EmsStoreConnector", "kv_role": role},
            options=options,
            environment={"EMS_SOCKET": str(self._socket), "EMS_DIR": str(self._pool), "EMS_AUTOSTART": "0"},
        )

    def _ems(self, verb: str, port_flag: str, flags: list[str]) -> ServerProcess:
        port = free_port()
        command = [sys.executable, "-m", "ems.cli", verb, port_flag, str(port), *flags]
        environment = {"EMS_SOCKET": str(self._socket)}
        return ServerProcess(command, name=f"ems {verb}", port=port, log=LOGS / f"{verb}.log", environment=environment)


def main() -> int:
    started = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    servers: list[ServerProcess] = []
    try:
        with pool_directory() as pool:
            begin("making a small model with random weights")
            demo = Demo(make_model(LOGS.parent / "models" / "demo"), pool)
            servers = demo.started
            with demo.running("the pool node", demo.node):
                demo.chat_through_router()
                report = demo.time_to_first_token()
        out.print()
        for line in table(report).lines(None):
            out.print(line)
        if platform.machine() == "x86_64" and "avx512" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            out.print(
                "This processor has no AVX-512 and computes prompts some twenty times as slowly, so the speed-up is "
                "larger than elsewhere."
            )
        status = verdict(report)
    except KeyboardInterrupt:
        err.print("interrupted, all is stopped")
        status = 130
    except EmsError as error:
        err.print(f"error: {error}", markup=False)
        err.print(f"\nhint: what the servers said is in {LOGS}", markup=False)
        status = 1
    left = left_behind(servers)
    if left:
        err.print(f"error: left behind: {', '.join(left)}", markup=False)
        return status or 1
    if status == 0:
        seconds = time.monotonic() - started
        out.print(f"Stopped everything after {seconds:.0f} s: no process, no shared memory, no port is left")
    return status


def verdict(report: Report) -> int:
    """Return the exit status that the measurement deserves."""
    different = sum(report.plan.requests - step.same_text for step in report.steps)
    if different or report.failed:
        err.print(f"error: {different} texts differ from those of step 1, {report.failed} requests failed")
        return 1
    return 0


def growth(before: dict[str, float], after: dict[str, float], name: str) -> int:
    if name not in after:
        raise DemoError(f"the metric {name} is missing, expected it on the server's /metrics")
    return round(after[name] - before.get(name, 0.0))


# ------------------------------------------------------------------------------------------------------ what is shown


def begin(what: str) -> None:
    out.print(f"[bold]>[/bold] {what}")


def tell_pass(name: str, done: int, total: int) -> None:
    if done == total:
        err.print(f"  done: {' '.join(name.split())}", markup=False)


def show_answer(url: str) -> int:
    """Ask the question, print the answer as it comes, and return how many tokens the prompt had."""
    out.print(f"  user:      {QUESTION[:60]}... ({len(QUESTION)} letters)")
    out.print("  assistant:", end="")
    prompt_tokens = 0
    for event in stream_chat(url):
        for choice in event.get("choices", []):
            out.print(choice["delta"].get("content") or "", end="", markup=False)
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    out.print()
    return prompt_tokens


def stream_chat(url: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed chat completion."""
    body = {
        "model": SERVED_MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
    except urllib.error.HTTPError as error:
        reason = error.read(300).decode(errors="replace")
        raise DemoError(f"the router answers with status {error.code}: {reason}") from error
    except OSError as error:
        raise DemoError(f"the router broke off the answer: {error}") from error


# --------------------------------------------------------------------------------------------------- nothing stays


@contextmanager
def pool_directory() -> Iterator[Path]:
    """Make a folder for the pool in shared memory, and remove it in the end."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
    except OSError as error:
        raise DemoError(f"{SHARED_MEMORY} cannot be used ({error.strerror}), expected a tmpfs there") from error
    if free < POOL_MIB + SPARE_MIB:
        needed = f"{SHARED_MEMORY} has {free} MiB free and the demonstration needs {POOL_MIB + SPARE_MIB}"
        raise DemoError(f"{needed}; free some, or enlarge it (docker run --shm-size=1g)")
    for stale in SHARED_MEMORY.glob(f"{PREFIX}*"):  # of demonstrations that were killed
        if not psutil.pid_exists(int(stale.name.removeprefix(PREFIX).partition("-")[0])):
            shutil.rmtree(stale, ignore_errors=True)
    pool = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
    try:
        yield pool
    finally:
        with deferred_signals():
            shutil.rmtree(pool, ignore_errors=True)  # the node leaves its pages there for the next one


def interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def left_behind(servers: list[ServerProcess]) -> list[str]:
    """Return what of the servers is still there; nothing, unless something is wrong."""
    found = [f"process {process.pid} of {server.name}" for server in servers for process in server.processes()]
    found += [f"port {server.port} of {server.name}" for server in servers if listens(server.port)]
    found += [str(path) for path in SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*")]
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    sys.exit(main())
