#!/usr/bin/env python3
"""Minutes of load on two engines whose pool node is killed, frozen and started again at random moments.

Every answer is compared, token by token, with that of an engine without a connector; no request may fail or hang; and
when the load is over, the engines have all their blocks back and the pool holds nothing for anybody.  The first engine
keeps prefixes itself and has so few blocks that it preempts requests, the second keeps none; the steps of both overlap.

Run it with the project's interpreter: ``python scripts/chaos.py [--minutes 10] [--seed 0] [--help]``.  Progress goes to
stderr, the result to stdout; the exit status is 1 when anything was found, 2 when the usage was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):  # run as a program
    sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.chaos_load import MIX, Job, Load, Tally, Tokens, faults, first_difference
from tests.kit.engine import EngineOptions, ProcessError, VllmServer
from tests.kit.node import NodeProcess
from tests.kit.tiny_model import Size, make_model
from tests.kit.waiting import until

OPTIONS = EngineOptions(
    block_size=32, max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=16, gpu_blocks=90, async_scheduling=True
)
MODELS: dict[Size, EngineOptions] = {
    "test": OPTIONS,
    "mha": OPTIONS,
    "hybrid": msgspec.structs.replace(OPTIONS, gpu_blocks=150),
    "mla": msgspec.structs.replace(
        OPTIONS, block_size=16, gpu_blocks=180, dtype="float32", arguments=("--attention-backend", "CPU_MLA")
    ),
}
"""Latent attention in bfloat16 has two texts for some prompts, computed or kept, without any connector."""
SETTLE_SECONDS = 60.0
"""How long engines and pool may take to let go of everything after the last answer."""
PIECE_SECONDS = 120.0
REPORT_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what came of it, and return the exit status."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ems-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tally, figures = run(options.model, options.seed, options.minutes * 60, options, folder)
        except KeyboardInterrupt:
            _say("interrupted")
            return 130
        except ProcessError as error:
            _say(str(error))
            return 1
    if options.output == "json":
        print(json.dumps({**_summary(tally), **figures, "violations": tally.violations}, indent=2))
    else:
        _print_tables(tally, figures)
    return 1 if tally.violations else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=_positive, default=10.0, help="how long load is made (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults (default 0)")
    parser.add_argument("--model", choices=list(MODELS), default="test", help="layout of the KV (default test: GQA)")
    parser.add_argument("--clients", type=int, choices=range(1, 65), default=8, metavar="1-64", help="at once")
    parser.add_argument("--deadline", type=_positive, default=120.0, help="seconds that a request may take")
    parser.add_argument("--logs", type=Path, help="folder that keeps model and logs; without it they are removed")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def run(
    model: Size, seed: int, seconds: float, options: argparse.Namespace, folder: Path
) -> tuple[Tally, dict[str, Any]]:
    """Start everything, make load and faults for ``seconds``, wait for rest, look what is left."""
    directory = make_model(folder / "model", model)
    with NodeProcess("--size", "256MB") as node:
        plain, *servers = _servers(directory, MODELS[model], node, folder)
        with _running([plain, *servers]):
            _say(f"two engines, one without a connector, one node; {seconds / 60:g} minutes of load from seed {seed}")
            tally = Tally()
            runner = Runner(tally, servers, Reference(plain, options.deadline), options.deadline)
            breaker = Breaker(node, tally)
            with breaker.breaking(seed):
                runner.run(Load(seed), seconds, options.clients)
            node_up = node.returncode is None
            if not node_up:
                tally.violations.append(f"the node ended by itself with status {node.returncode}")
            figures = _look_after(tally, servers, node) if node_up else {}
            runner.compare(folder / "differences.jsonl")
            return tally, figures


def _servers(model: Path, options: EngineOptions, node: NodeProcess, folder: Path) -> list[VllmServer]:
    """One without a connector and with all the memory it wants, one with a small cache of prefixes, one without."""
    environment = {"EMS_DIR": str(node.directory), "EMS_SOCKET": str(node.socket), "EMS_AUTOSTART": "0"}
    extra = [
        # So small a model computes faster than anything loads; a node that is back is used again after seconds, or,
        # without a gate, with the next request.
        {"cost_model": False, "health_check_ms": 500},
        {"cost_model": False, "health_gate": False},
    ]
    plain = VllmServer(model, log=folder / "plain.log", options=msgspec.structs.replace(options, gpu_blocks=None))
    connected = [
        VllmServer(
            model,
            log=folder / f"server-{number}.log",
            kv_transfer_config={
                "kv_connector": "EmsStoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": extra[number],
            },
            options=msgspec.structs.replace(options, prefix_caching=number == 0),
            environment=environment,
        )
        for number in range(2)
    ]
    return [plain, *connected]


@contextmanager
def _running(servers: Sequence[VllmServer]) -> Iterator[None]:
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready(600)
        yield


class Reference:
    """What an engine without a connector says; asked while the load runs, a few requests at once."""

    def __init__(self, server: VllmServer, deadline: float) -> None:
        self._server = server
        self._deadline = deadline
        self._threads = ThreadPoolExecutor(4)
        self._answers: dict[tuple[Tokens, int], Future[Tokens]] = {}

    def logprobs(self, job: Job, answer: Tokens) -> dict[int, float]:
        """The likeliest tokens after the prompt and ``answer``."""
        return next_logprobs(self._server, job, answer, self._deadline)

    def ask(self, job: Job) -> Future[Tokens]:
        """The answer to ``job``, now or later."""
        key = job.prompt, job.tokens
        if key not in self._answers:
            self._answers[key] = self._threads.submit(complete, self._server, job, self._deadline)
        return self._answers[key]


class Runner:
    """Makes requests and keeps what came of them."""

    def __init__(self, tally: Tally, servers: Sequence[VllmServer], reference: Reference, deadline: float) -> None:
        self._tally = tally
        self._servers = servers
        self._reference = reference
        self._deadline = deadline
        self._lock = threading.Lock()
        self._pairs: list[tuple[Job, Tokens, Future[Tokens]]] = []

    def run(self, load: Load, seconds: float, clients: int) -> None:
        """Let ``clients`` make one request after the other for ``seconds``, and wait for the last answers."""
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as threads:
            working = [threads.submit(self._client, load, end) for _ in range(clients)]
            while not all(client.done() for client in working):
                time.sleep(min(REPORT_SECONDS, max(end - time.monotonic(), 1.0)))
                self._report(end)
        for client in working:
            client.result()

    def compare(self, log: Path) -> None:
        """Compare all answers with the reference's; ``log`` gets the requests whose answers differ."""
        _say(f"comparing {len(self._pairs)} answers")
        with log.open("w") as lines:
            for job, answer, expected in self._pairs:
                try:
                    right = expected.result()
                    place = first_difference(answer, right)
                    if place is None:
                        continue
                    logprobs = self._reference.logprobs(job, right[:place])
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self._tally.fail(job, f"the engine without a connector does not answer, {error}")
                    continue
                self._tally.differs(job, place, answer, logprobs)
                facts = {"job": job, "answer": answer, "expected": right, "logprobs": logprobs}
                lines.write(msgspec.json.encode(facts).decode() + "\n")

    def _client(self, load: Load, end: float) -> None:
        while time.monotonic() < end:
            with self._lock:
                job = load.next()
                self._tally.asked[job.kind] += 1
            self._ask(load, job)

    def _ask(self, load: Load, job: Job) -> None:
        server = self._servers[job.server]
        try:
            if job.leave_after is not None:
                leave(server, job, self._deadline)
                with self._lock:
                    self._tally.left[job.kind] += 1
                return
            answer = complete(server, job, self._deadline)
        except TimeoutError:
            problem = f"no answer after {self._deadline:g} s"
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            with self._lock:
                self._tally.answered[job.kind] += 1
                load.answered(job, answer)
                self._pairs.append((job, answer, self._reference.ask(job)))
            return
        with self._lock:
            self._tally.fail(job, problem)

    def _report(self, end: float) -> None:
        with self._lock:
            tally = self._tally
            left = max(end - time.monotonic(), 0.0)
            _say(
                f"{left:5.0f} s to go, {sum(tally.asked.values())} asked, {sum(tally.answered.values())} answered, "
                f"{tally.faults['kill']} kills, {tally.faults['freeze']} freezes, {len(tally.violations)} violations"
            )


def complete(server: VllmServer, job: Job, deadline: float) -> Tokens:
    """The tokens of the answer.

    Raises:
        ValueError: the server answered with an error.
        OSError: it did not answer; TimeoutError where that took ``deadline`` seconds.
    """
    return tuple(_choice(server, _body(job), deadline)["token_ids"])


def next_logprobs(server: VllmServer, job: Job, answer: Tokens, deadline: float) -> dict[int, float]:
    """The likeliest tokens after the prompt and ``answer``; raises as :func:`complete` does."""
    body = {
        **_body(job),
        "prompt": job.prompt + answer,
        "max_tokens": 1,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    top = _choice(server, body, deadline)["logprobs"]["top_logprobs"][0]
    return {int(token.removeprefix("token_id:")): value for token, value in top.items()}


def _choice(server: VllmServer, body: dict[str, Any], deadline: float) -> dict[str, Any]:
    with _posted(server, body, deadline) as answer:
        raw = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"status {answer.status}, {raw[:300].decode(errors='replace')}")
    return dict(json.loads(raw)["choices"][0])


def _body(job: Job) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": job.prompt,
        "max_tokens": job.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def leave(server: VllmServer, job: Job, deadline: float) -> None:
    """Hang up after some pieces of the answer.

    Raises:
        ValueError: the server answered with an error.
        OSError: it did not answer; TimeoutError where that took ``deadline`` seconds.
    """
    with _posted(server, {**_body(job), "stream": True}, deadline, wait=bool(job.leave_after)) as answer:
        for _ in range(job.leave_after or 0):
            line = answer.readline()
            if b'"error"' in line:
                raise ValueError(line[:300].decode(errors="replace"))


@contextmanager
def _posted(
    server: VllmServer, body: dict[str, Any], deadline: float, *, wait: bool = True
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=deadline)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse() if wait else http.client.HTTPResponse(connection.sock)
    finally:
        connection.close()


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


def _look_after(tally: Tally, servers: Sequence[VllmServer], node: NodeProcess) -> dict[str, Any]:
    """Wait for rest; what is not free then is a violation.  Returns what the engines counted."""
    for number, server in enumerate(servers):
        _expect_nothing(tally, f"server {number}", _engine_holds(server))
    _expect_nothing(tally, "pool", _pool_holds(node))
    metrics = [server.metrics() for server in servers]
    hits = sum(each.get("vllm:external_prefix_cache_hits_total", 0) for each in metrics)
    if not hits:
        tally.violations.append("no token came from the pool, so this run shows nothing")
    return {
        "tokens_from_pool": int(hits),
        "preemptions": int(sum(each["vllm:num_preemptions_total"] for each in metrics)),
        "prompt_tokens": int(sum(each["vllm:prompt_tokens_total"] for each in metrics)),
    }


def _expect_nothing(tally: Tally, holder: str, held: Callable[[], dict[str, float]]) -> None:
    try:
        until(lambda: not any(held().values()), "all is free", SETTLE_SECONDS)
    except AssertionError:
        tally.leftovers(holder, held())


def _engine_holds(server: VllmServer) -> Callable[[], dict[str, float]]:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def held() -> dict[str, float]:
        metrics = server.metrics()
        return {name: metrics[name] for name in names}

    return held


def _pool_holds(node: NodeProcess) -> Callable[[], dict[str, float]]:
    """What ``ems status`` says is held."""
    command = [sys.executable, "-m", "ems.cli", "status", "-o", "json", "--socket", str(node.socket)]

    def held() -> dict[str, float]:
        shown = subprocess.run(command, env=dict(os.environ), check=True, capture_output=True, timeout=PIECE_SECONDS)
        figures = json.loads(shown.stdout)
        writing = sum(namespace["writing"] for namespace in figures["namespaces"])
        return {**{name: figures[name] for name in ("leases", "reservations", "slots_resting")}, "writing": writing}

    return held


def _summary(tally: Tally) -> dict[str, Any]:
    columns = {
        "asked": tally.asked,
        "answered": tally.answered,
        "left": tally.left,
        "failed": tally.failed,
        "ties": tally.ties,
        "wrong": tally.wrong,
    }
    requests = {kind: {name: column[kind] for name, column in columns.items()} for kind in MIX}
    return {"requests": requests, "faults": dict(tally.faults)}


def _print_tables(tally: Tally, figures: dict[str, Any]) -> None:
    console = Console()
    table = Table("requests", *("asked", "answered", "left", "failed", "ties", "wrong"))
    for kind, row in _summary(tally)["requests"].items():
        table.add_row(kind, *map(str, row.values()))
    console.print(table)
    others = Table("what", "count")
    for name, count in {**tally.faults, **figures, "violations": len(tally.violations)}.items():
        others.add_row(name.replace("_", " "), f"{count:,}")
    console.print(others)
    for violation in tally.violations:
        console.print(violation, markup=False, highlight=False, soft_wrap=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
