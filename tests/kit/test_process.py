"""How server processes are watched, on small servers of our own; vLLM behaves like one of them or the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.process import ProcessError, ServerProcess, deferred_signals, free_port, mapped_semaphores

pytestmark = pytest.mark.process

SERVER = """
import http.server, multiprocessing, signal, subprocess, sys, time
behaviour = sys.argv[2]
if behaviour == "dies":
    print("Traceback (most recent call last):")
    print("(EngineCore pid=7) ERROR 01-01 [core.py:1] ValueError: the cache is too small")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(3)
if behaviour == "hangs":
    print("loading weights", flush=True)
    time.sleep(600)
if behaviour in ("stubborn", "with a child"):
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", ignore])
if behaviour == "with a semaphore":
    held = multiprocessing.get_context("spawn").Semaphore()
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            lines = ["# TYPE hits counter", 'hits_total{engine="0"} 2', 'hits_total{engine="1"} 3', "hits_created 9"]
            lines += ["# TYPE size histogram", 'size_bucket{le="+Inf"} 4', "size_count 4", "size_sum 8"]
            self.wfile.write("\\n".join([*lines, ""]).encode())
    def log_message(self, *_): pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], ServerProcess]:
    def build(behaviour: str) -> ServerProcess:
        port = free_port()
        command = [sys.executable, "-c", SERVER, str(port), behaviour]
        return ServerProcess(command, name="server", port=port, log=tmp_path / "logs" / "server.log")

    return build


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_from_start_to_stop(make: Callable[[str], ServerProcess]) -> None:
    server = make("well-behaved")
    assert not server.is_healthy()
    with server:
        assert server.is_healthy()
        assert len(server.processes()) == 1
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) == 0

    assert server.processes() == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_stopping_twice_or_before_the_start_is_harmless(make: Callable[[str], ServerProcess]) -> None:
    server = make("well-behaved")
    server.stop()
    server.kill()
    assert server.processes() == []
    with server:
        pass
    server.stop()


@pytest.mark.parametrize("behaviour", ["with a child", "stubborn"])
def test_children_and_the_stubborn_end_too(make: Callable[[str], ServerProcess], behaviour: str) -> None:
    server = make(behaviour)
    server.start()
    server.wait_ready()
    eventually(lambda: len(server.processes()) == 2)
    processes = server.processes()

    server.stop(grace=0.2)

    assert gone(processes)


def test_a_child_whose_parent_crashed_ends_too(make: Callable[[str], ServerProcess]) -> None:
    server = make("with a child")
    server.start()
    server.wait_ready()
    eventually(lambda: len(server.processes()) == 2)
    processes = server.processes()
    next(process for process in processes if process.ppid() == os.getpid()).kill()

    server.stop()

    assert gone(processes)


def test_semaphores_of_who_was_killed_are_gone_and_those_that_others_use_stay(
    make: Callable[[str], ServerProcess],
) -> None:
    kept = multiprocessing.get_context("spawn").Semaphore()
    server = make("with a semaphore")
    server.start()
    server.wait_ready()
    own = mapped_semaphores(server.processes())
    assert own

    server.kill()

    assert not any(path.exists() for path in own)
    assert mapped_semaphores([psutil.Process()])
    assert kept.acquire(timeout=0)


def test_why_it_did_not_come_up(make: Callable[[str], ServerProcess]) -> None:
    server = make("dies")
    with pytest.raises(ProcessError) as caught, server:
        pass

    assert str(caught.value) == (
        f"server ended with status 3 while starting: ValueError: the cache is too small (more in {server.log})"
    )


def test_one_that_never_gets_ready(make: Callable[[str], ServerProcess]) -> None:
    server = make("hangs")
    waited: list[float] = []
    server.start()
    try:
        eventually(lambda: "loading" in server.log.read_text())
        with pytest.raises(ProcessError, match=r"server was not ready after 0.5 s: loading weights \(more in "):
            server.wait_ready(0.5, progress=waited.append)
    finally:
        server.stop(grace=0)

    assert waited == sorted(waited)
    assert len(waited) >= 2
    assert server.processes() == []


def test_metrics_are_added_up(make: Callable[[str], ServerProcess]) -> None:
    with make("well-behaved") as server:
        assert server.metrics() == {"hits_total": 5.0, "size_count": 4.0, "size_sum": 8.0}
    with pytest.raises(ProcessError, match="gives no metrics"):
        server.metrics()


def test_it_dies_with_whoever_started_it(tmp_path: Path) -> None:
    """Also when that one is killed and can clean up nothing."""
    log = tmp_path / "log"
    program = f"""
import sys
from pathlib import Path
from tests.kit.process import ServerProcess, free_port
port = free_port()
server = ServerProcess(
    [sys.executable, "-c", {SERVER!r}, str(port), "well-behaved"], name="s", port=port, log=Path({str(log)!r})
)
server.start()
server.wait_ready()
print(server.processes()[0].pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        assert server.is_running()
        starter.send_signal(signal.SIGKILL)
        starter.wait()

    eventually(lambda: gone([server]))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, also where the tests were started in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_wait_for_what_must_be_done_whole() -> None:
    done = []

    def work() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.timeout(30)
def test_an_interrupt_while_servers_start_is_neither_lost_nor_leaves_one(tmp_path: Path) -> None:
    """Each signal raises, wherever it strikes; a lost one would leave this test waiting for it until its time is up."""
    program = f"""
import logging, os, signal  # logging is one of those that run Python after a fork
from pathlib import Path
import psutil
from tests.kit.process import ServerProcess


memory = b"x" * (100 << 20)  # a fork of much memory takes its time, and most signals strike in it
raised = 0
signals = {{signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)

def handler(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, handler)
log = Path({str(tmp_path)!r}) / "log"
servers = [ServerProcess([], name="s", port=1, log=log)]  # all are kept: what a finaliser raises is lost
print(os.getpid(), flush=True)
while True:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        while True:
            servers.append(ServerProcess(["sleep", "60"], name="s", port=1, log=log))
            servers[-1].start()
            servers[-1].stop()
    except KeyboardInterrupt:
        servers[-1].stop()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        raised += 1
        print(raised, len(psutil.Process().children()), flush=True)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert int(starter.stdout.readline()) == starter.pid
        try:
            for count in range(1, 201):
                starter.send_signal(signal.SIGTERM)
                assert starter.stdout.readline() == f"{count} 0\n"
        finally:
            starter.kill()


def test_ports_are_not_handed_out_twice() -> None:
    ports = [free_port() for _ in range(200)]

    assert len(set(ports)) == 200


@pytest.mark.parametrize("begin", [30_000, 1024], ids=["some-are-left", "none-are-left"])
def test_ports_are_not_those_of_connections_own_ends(
    begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    told.write_text(f"{begin}\t60999\n")
    monkeypatch.setattr("tests.kit.process._OWN_ENDS", told)
    ports = [free_port() for _ in range(50)]

    assert len(set(ports)) == 50
    if begin == 30_000:
        assert max(ports) < begin


def test_flags_of_vllm(tmp_path: Path) -> None:
    server = VllmServer(
        tmp_path / "model",
        log=tmp_path / "log",
        port=7100,
        kv_transfer_config={"kv_connector": "EmsStoreConnector", "kv_role": "kv_both"},
        options=EngineOptions(prefix_caching=True, gpu_blocks=48, arguments=("--swap-space", "0")),
    )
    line = " ".join(server._command)

    assert "--num-gpu-blocks-override 48" in line
    assert "--enable-prefix-caching" in line
    assert line.endswith("--swap-space 0")
    assert '"kv_connector":"EmsStoreConnector"' in line
    assert server.url == "http://127.0.0.1:7100"


def test_policy_of_the_caller_wins(tmp_path: Path) -> None:
    config = {"kv_connector": "X", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    server = VllmServer(tmp_path, log=tmp_path / "log", kv_transfer_config=config)

    assert '"kv_load_failure_policy":"fail"' in " ".join(server._command)
