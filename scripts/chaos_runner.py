"""What chaos runs share: engines as clients reach them, requests, answers that are compared, and the report.

What always holds: no request is waited for longer than its deadline; one that ended with an engine that was killed
meanwhile is counted as cut, and every other one that fails is a violation.
"""

from __future__ import annotations

import argparse
import contextlib
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

from scripts.chaos_load import MIX, Job, Load, Tally, Tokens, first_difference
from tests.kit.engine import EngineOptions, ProcessError, VllmServer
from tests.kit.hosts import Host
from tests.kit.node import NodeProcess
from tests.kit.waiting import until

OPTIONS = EngineOptions(
    block_size=32, max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=16, gpu_blocks=90, async_scheduling=True
)
SETTLE_SECONDS = 60.0
"""How long engines and pool may take to let go of everything after the last answer."""
PIECE_SECONDS = 120.0
READY_SECONDS = 900.0
REPORT_SECONDS = 10.0
NO_ENGINE_PAUSE = 0.5


# The frame


def parser_of(description: str) -> argparse.ArgumentParser:
    """What all chaos runs can be told."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--minutes", type=positive, default=10.0, help="how long load is made (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults (default 0)")
    parser.add_argument("--clients", type=int, choices=range(1, 65), default=8, metavar="1-64", help="at once")
    parser.add_argument("--deadline", type=positive, default=120.0, help="seconds that a request may take")
    parser.add_argument("--logs", type=Path, help="folder that keeps model and logs; without it they are removed")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def conduct(options: argparse.Namespace, run: Callable[[Path], tuple[Tally, dict[str, Any]]]) -> int:
    """Do ``run`` with a folder for its files, print what came of it, and return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ems-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tally, figures = run(folder)
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except ProcessError as error:
            say(str(error))
            return 1
    if options.output == "json":
        print(json.dumps({**_summary(tally), **figures, "violations": tally.violations}, indent=2))
    else:
        _print_tables(tally, figures)
    return 1 if tally.violations else 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Engines


def plain_server(model: Path, options: EngineOptions, folder: Path) -> VllmServer:
    """One without a connector, and with all the memory it wants."""
    return VllmServer(model, log=folder / "plain.log", options=msgspec.structs.replace(options, gpu_blocks=None))


def connected_server(
    model: Path, options: EngineOptions, node: NodeProcess, log: Path, **settings: object
) -> VllmServer:
    """One that uses ``node``, whatever it costs: so small a model computes faster than anything loads."""
    return VllmServer(
        model,
        log=log,
        kv_transfer_config={
            "kv_connector": "EmsStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"cost_model": False, **settings},
        },
        options=options,
        environment={
            "EMS_DIR": str(node.directory),
            "EMS_SOCKET": str(node.socket),
            "EMS_AUTOSTART": "0",
            "VLLM_HOST_IP": "127.0.0.1",
        },
    )


class Engine:
    """A server as clients see it, on ``host`` where it has one; it may be killed while they use it."""

    def __init__(self, server: VllmServer, host: Host | None = None) -> None:
        self.server = server
        self.host = host
        self.up = True
        self.kills = 0
        """Whoever counts one sets :attr:`up` to false first."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return self.host.entered() if self.host is not None else contextlib.nullcontext()

    def start(self) -> None:
        """From a thread that lives as long as the server is needed."""
        with self.entered():
            self.server.start()

    def is_healthy(self) -> bool:
        with self.entered():
            return self.server.is_healthy()

    def metrics(self) -> dict[str, float]:
        with self.entered():
            return self.server.metrics()

    def connect(self, deadline: float) -> http.client.HTTPConnection:
        """A connection from the engine's own host: no link between hosts is in the way."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=deadline)
        with self.entered():
            connection.connect()
        return connection


@contextmanager
def running(engines: Sequence[Engine]) -> Iterator[None]:
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.server.stop)
            engine.start()
        for engine in engines:
            with engine.entered():
                engine.server.wait_ready(READY_SECONDS)
        yield


# Requests


class Reference:
    """What an engine without a connector says; asked while the load runs, a few requests at once."""

    def __init__(self, server: VllmServer, deadline: float) -> None:
        self._engine = Engine(server)
        self._deadline = deadline
        self._threads = ThreadPoolExecutor(4)
        self._answers: dict[tuple[Tokens, int], Future[Tokens]] = {}

    def logprobs(self, job: Job, answer: Tokens) -> dict[int, float]:
        """The likeliest tokens after the prompt and ``answer``."""
        return next_logprobs(self._engine, job, answer, self._deadline)

    def ask(self, job: Job) -> Future[Tokens]:
        """The answer to ``job``, now or later."""
        key = job.prompt, job.tokens
        if key not in self._answers:
            self._answers[key] = self._threads.submit(complete, self._engine, job, self._deadline)
        return self._answers[key]


class Runner:
    """Makes requests and keeps what came of them."""

    def __init__(self, tally: Tally, engines: Sequence[Engine], reference: Reference, deadline: float) -> None:
        self._tally = tally
        self._engines = engines
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
        say(f"comparing {len(self._pairs)} answers")
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
        while True:  # at least once, also where starting a thread takes longer than the load is to last
            with self._lock:
                job = load.next()
                self._tally.asked[job.kind] += 1
            self._ask(load, job)
            if time.monotonic() >= end:
                return

    def _ask(self, load: Load, job: Job) -> None:
        engine, kills = self._reached(job)
        if engine is None:
            with self._lock:
                self._tally.cut[job.kind] += 1
            time.sleep(NO_ENGINE_PAUSE)  # bounded by the end of the load
            return
        try:
            if job.leave_after is not None:
                leave(engine, job, self._deadline)
                with self._lock:
                    self._tally.left[job.kind] += 1
                return
            answer = complete(engine, job, self._deadline)
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
            if engine.kills != kills:
                self._tally.cut[job.kind] += 1
            else:
                self._tally.fail(job, problem)

    def _reached(self, job: Job) -> tuple[Engine | None, int]:
        """The engine that ``job`` goes to, or the next one that is up; and how often it was killed before."""
        for number in range(len(self._engines)):
            engine = self._engines[(job.server + number) % len(self._engines)]
            kills = engine.kills  # first: who kills says that it is not up before it counts
            if engine.up:
                return engine, kills
        return None, 0

    def _report(self, end: float) -> None:
        with self._lock:
            tally = self._tally
            left = max(end - time.monotonic(), 0.0)
            broken = ", ".join(f"{count} x {kind}" for kind, count in sorted(tally.faults.items()))
            say(
                f"{left:5.0f} s to go, {sum(tally.asked.values())} asked, {sum(tally.answered.values())} answered, "
                f"{broken or 'nothing broken'}, {len(tally.violations)} violations"
            )


def complete(engine: Engine, job: Job, deadline: float) -> Tokens:
    """The tokens of the answer.

    Raises:
        ValueError: the server answered with an error.
        OSError: it did not answer; TimeoutError where that took ``deadline`` seconds.
    """
    return tuple(_choice(engine, _body(job), deadline)["token_ids"])


def next_logprobs(engine: Engine, job: Job, answer: Tokens, deadline: float) -> dict[int, float]:
    """The likeliest tokens after the prompt and ``answer``; raises as :func:`complete` does."""
    body = {
        **_body(job),
        "prompt": job.prompt + answer,
        "max_tokens": 1,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    top = _choice(engine, body, deadline)["logprobs"]["top_logprobs"][0]
    return {int(token.removeprefix("token_id:")): value for token, value in top.items()}


def _choice(engine: Engine, body: dict[str, Any], deadline: float) -> dict[str, Any]:
    with _posted(engine, body, deadline) as answer:
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


def leave(engine: Engine, job: Job, deadline: float) -> None:
    """Hang up after some pieces of the answer.

    Raises:
        ValueError: the server answered with an error.
        OSError: it did not answer; TimeoutError where that took ``deadline`` seconds.
    """
    with _posted(engine, {**_body(job), "stream": True}, deadline, wait=bool(job.leave_after)) as answer:
        for _ in range(job.leave_after or 0):
            line = answer.readline()
            if b'"error"' in line:
                raise ValueError(line[:300].decode(errors="replace"))


@contextmanager
def _posted(
    engine: Engine, body: dict[str, Any], deadline: float, *, wait: bool = True
) -> Iterator[http.client.HTTPResponse]:
    connection = engine.connect(deadline)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse() if wait else http.client.HTTPResponse(connection.sock)
    finally:
        connection.close()


# Afterwards


def expect_nothing(tally: Tally, holder: str, held: Callable[[], dict[str, float]]) -> None:
    """Whatever is still held after a while is a violation."""
    try:
        until(lambda: not any(held().values()), "all is free", SETTLE_SECONDS)
    except AssertionError:
        tally.leftovers(holder, held())


def engine_holds(engine: Engine) -> Callable[[], dict[str, float]]:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def held() -> dict[str, float]:
        metrics = engine.metrics()
        return {name: metrics[name] for name in names}

    return held


def pool_holds(node: NodeProcess) -> Callable[[], dict[str, float]]:
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
        "cut": tally.cut,
        "failed": tally.failed,
        "ties": tally.ties,
        "wrong": tally.wrong,
    }
    requests = {kind: {name: column[kind] for name, column in columns.items()} for kind in MIX}
    return {"requests": requests, "faults": dict(tally.faults)}


def _print_tables(tally: Tally, figures: dict[str, Any]) -> None:
    console = Console()
    table = Table("requests", *("asked", "answered", "left", "cut", "failed", "ties", "wrong"))
    for kind, row in _summary(tally)["requests"].items():
        table.add_row(kind, *map(str, row.values()))
    console.print(table)
    others = Table("what", "count")
    for name, count in {**tally.faults, **figures, "violations": len(tally.violations)}.items():
        others.add_row(name.replace("_", " "), f"{count:,}")
    console.print(others)
    for violation in tally.violations:
        console.print(violation, markup=False, highlight=False, soft_wrap=True)
