"""Real parts for end-to-end tests: a pool node, vLLM servers in front of it, and one without for comparison."""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from ems.pool.client.pool_client import PoolClient
from ems.pool.processes import process_lives
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.prepared import PreparedProgram, start_node

BLOCK = 32
OPTIONS = EngineOptions(
    block_size=BLOCK,
    max_model_len=2048,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    dtype="float32",
    async_scheduling=True,
)
"""Chunked prefill: a prompt above 256 tokens takes several steps.  Steps overlap, as on every accelerator.

Most processors compute 32-bit values several times faster than 16-bit ones.
"""

PAUSE = 0.02
"""Seconds between two looks."""
ANSWER_SECONDS = 600.0
"""For one answer, however slow the machine: many at once take minutes there."""
READY_SECONDS = 1200.0
"""For several engines that start beside each other."""
NODE_SECONDS = 60.0
"""For what takes a node a second on an idle machine."""
QUIET_LOOKS = 25

Prompt = list[int]
Thing = TypeVar("Thing")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Return once ``condition`` holds; fail with ``what`` when it does not in time."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:.0f} s")
        pause.wait(PAUSE)


def first(take: Callable[[], Sequence[Thing]], what: str, seconds: float = 30.0) -> Thing:
    """The first thing that ``take``, called again and again, brings."""
    taken: list[Thing] = []

    def came() -> bool:
        taken.extend(take())
        return bool(taken)

    wait_for(came, what, seconds)
    return taken[0]


def random_prompt(seed: int, tokens: int) -> Prompt:
    random = Random(seed)
    return [random.randrange(300, 1000) for _ in range(tokens)]


def post(url: str, path: str, body: dict[str, Any], timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 - a server of our own
        url + path, json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        return dict(json.load(answer))


def complete(url: str, prompt: Prompt, tokens: int = 12) -> str:
    """The greedy continuation of ``prompt``."""
    answer = post(
        url, "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    )
    return str(answer["choices"][0]["text"])


def leave(url: str, prompt: Prompt, after: int) -> None:
    """Ask for a long answer and hang up after ``after`` pieces of it; 0 does not wait for the first."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_SECONDS)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if after:
        answer = connection.getresponse()
        for _ in range(after):
            answer.readline()
    connection.close()


def complete_all(url: str, prompts: Sequence[Prompt], tokens: int = 12, at_once: int = 8) -> list[str]:
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda prompt: complete(url, prompt, tokens), prompts))


class Node:
    """A pool node in a folder of its own, which can be killed and started again."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.socket = directory / "node.sock"
        self._flags = flags
        self._process: PreparedProgram | None = None

    def start(self) -> None:
        with self.directory.with_suffix(".err").open("ab") as log:
            self._process = start_node(
                "--dir", str(self.directory), "--no-http", *self._flags, output=log, environment=os.environ
            )
        self.wait_listening()

    def wait_listening(self) -> None:
        wait_for(self._listens, "the node listens", NODE_SECONDS)

    def _listens(self) -> bool:
        try:
            self.stats()
        except (ConnectionError, TimeoutError):
            return False
        return True

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_serving(self, pid: int) -> None:
        """Kill the process that serves now, which is another one than was started after an upgrade."""
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not process_lives(pid), "the node is gone")
        assert self._process is not None
        self._process.wait(NODE_SECONDS)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The node is there and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        with suppress(ConnectionError, TimeoutError):
            os.kill(self.stats()["pid"], signal.SIGTERM)  # after an upgrade it is not the process that was started
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(NODE_SECONDS)

    def stats(self) -> dict[str, Any]:
        client = PoolClient(self.socket, "test", administers=True)
        try:
            return client.stats(NODE_SECONDS)
        finally:
            client.close()

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.stats()["counters"])

    def wait_stored(self) -> None:
        """Return when engines store nothing more: nothing is being written, and nothing was for half a second."""
        quiet, seen = 0, -1

        def settled() -> bool:
            nonlocal quiet, seen
            stats = self.stats()
            committed = stats["counters"]["pages_committed"]
            quiet = quiet + 1 if stats["reservations"] == 0 and committed == seen else 0
            seen = committed
            return quiet >= QUIET_LOOKS

        wait_for(settled, "everything is stored")

    @property
    def environment(self) -> dict[str, str]:
        return {"EMS_DIR": str(self.directory), "EMS_SOCKET": str(self.socket), "EMS_AUTOSTART": "0"}


@contextmanager
def pool_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ems-e2e-", dir="/dev/shm", ignore_cleanup_errors=True) as name:
        yield Path(name) / "pool"


@contextmanager
def running_node(*flags: str) -> Iterator[Node]:
    with pool_directory() as directory:
        node = Node(directory, *flags)
        node.start()
        try:
            yield node
        finally:
            node.stop()


@contextmanager
def running(*servers: VllmServer) -> Iterator[None]:
    """Start servers beside each other."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready(READY_SECONDS)
        yield


PATIENT = {"lookup_timeout_ms": 15_000, "handoff_timeout_ms": 15_000, "call_timeout_ms": 10_000}
"""Hits are counted here, and a machine with other work may stand still for seconds: nobody gives up for that."""
HITS_COUNT = {"cost_model": False, "health_check_ms": 500, "explain": True, "load_async": True, **PATIENT}
"""Everything that is found is loaded, also what such a small model would compute faster, and the last token of what is
found whole, which a load within a step leaves to that step; a node that is back is used again after seconds.  A test
that misses a hit shows the engine's reason."""


def connector(role: str, **extra: object) -> dict[str, object]:
    """What one writes after ``--kv-transfer-config``; vLLM's own default failure policy stays in force."""
    return {
        "kv_connector": "EmsStoreConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {**HITS_COUNT, **extra},
    }


class Reference:
    """What an engine without any connector says, remembered for the whole session."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._texts: dict[tuple[tuple[int, ...], int], str] = {}

    def text(self, prompt: Prompt, tokens: int = 12) -> str:
        key = tuple(prompt), tokens
        if key not in self._texts:
            self._texts[key] = complete(self._url, prompt, tokens)
        return self._texts[key]

    def texts(self, prompts: Sequence[Prompt], tokens: int = 12, at_once: int = 8) -> list[str]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(lambda prompt: self.text(prompt, tokens), prompts))

    def chat(self, body: dict[str, Any]) -> str:
        return str(post(self._url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
