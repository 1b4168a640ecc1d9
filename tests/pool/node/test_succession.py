"""A node that hands itself over while clients are at work: nobody notices, whatever becomes of the new process."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import msgspec
import pytest

from ems.errors import ConfigError, EmsError, PoolUnavailable
from ems.pool.core.handover import ArenaState, ChangesState, CoreState, HandOver
from ems.pool.keys import Tail
from ems.pool.node import succession
from ems.pool.node.succession import Inheritance, give
from ems.pool.processes import process_lives
from ems.pool.protocol import coding, messages
from ems.testing.node import NodeProcess
from ems.testing.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.node.test_survival import NAMESPACE, load, store

FLAGS = ("--size", "16MB", "--segment-size", "64KB")
"""So many segments that their descriptors need more than one message."""


# The moment of truth, between two sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    old, new = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with old, new:
        yield old, new


def empty_state() -> HandOver:
    core = CoreState(0.0, True, [], {}, [], [], [], 1, {}, [], {}, 0, ChangesState([], 0, None))
    arena = ArenaState([], [], 1, 1)
    return HandOver("1", 2, bytes(16), {}, 0.0, 0, 1, 0, {}, False, arena, core, [])


def test_what_was_taken_is_given(pair: tuple[socket.socket, socket.socket]) -> None:
    old, new = pair
    new.sendall(coding.encode(messages.Taken()))
    assert give(old, empty_state(), [old.fileno()]) is None


@pytest.mark.parametrize("answer", [b"", coding.encode(messages.Release(1)), b"\0\0\0\2hi", b"\xff" * 8])
def test_what_was_not_taken_is_kept(pair: tuple[socket.socket, socket.socket], answer: bytes) -> None:
    old, new = pair
    new.sendall(answer)
    new.shutdown(socket.SHUT_WR)
    assert give(old, empty_state(), [])


def test_who_is_late_cannot_take_any_more(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair
    monkeypatch.setattr(succession, "HAND_OVER_SECONDS", 0.05)
    assert give(old, empty_state(), []) == "the new process was not ready within 0 s"
    with pytest.raises(BrokenPipeError):
        new.sendall(coding.encode(messages.Taken()))


def test_who_is_late_by_a_hair_has_taken(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken came after the last look and before the ear was closed."""
    old, new = pair
    receive = succession._receive_frame
    calls = itertools.count()

    def late(sock: socket.socket, deadline: float) -> bytes:
        if next(calls) == 0:
            new.sendall(coding.encode(messages.Taken()))
            raise TimeoutError
        return receive(sock, deadline)

    monkeypatch.setattr(succession, "_receive_frame", late)
    assert give(old, empty_state(), []) is None


# Real nodes


@pytest.fixture
def node(make_node: MakeNode) -> Iterator[NodeProcess]:
    running = make_node(*FLAGS)
    running.wait_touched()
    yield running
    assert "Traceback" not in running.log, running.log
    end(running)


def end(node: NodeProcess) -> None:
    """End the process that is the node by now, which is no child of this one."""
    with_node = subprocess.run(
        [sys.executable, "-m", "ems.cli", "stop", "--socket", str(node.socket)], check=False, capture_output=True
    )
    assert with_node.returncode == 0, with_node.stderr


def upgrade(node: NodeProcess) -> None:
    """Upgrade the node, once more where a machine stood still for so long that the node gave its successor up."""
    command = [sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(node.socket)]
    for _ in range(5):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if "did not wait for its successor and goes on" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


class Load:
    """Clients that store and load without a pause; ``failures`` are calls that failed or pages that were missing."""

    def __init__(self, node: NodeProcess, clients: int) -> None:
        self.failures: list[str] = []
        self.calls = 0
        self.stored: list[list[bytes]] = [[] for _ in range(clients)]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(node, number)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, node: NodeProcess, number: int) -> None:
        client = node.client(f"load {number}")
        kept = self.stored[number]
        try:
            for step in itertools.count():
                if self._stop.is_set():
                    break
                keys = chain(f"{number}/{step % 40}", 8)
                if step < 40:
                    kept += keys
                stored = store(client, keys)
                if stored not in (0, 8):
                    self.failures.append(f"stored {stored} of 8")
                if load(client, keys) != (8, 8):
                    self.failures.append(f"loaded {load(client, keys)} of 8")
                self.calls += 1
            if client.epoch != 1:
                self.failures.append("the connection was lost")
        except EmsError as error:
            self.failures.append(repr(error))
        finally:
            client.close()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.process
def test_five_upgrades_under_load_lose_nothing(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    tail = Tail(bytes(16), b"\1\0\0\0\2\0\0\0")
    store(client, [tail.key], tail=tail)
    before = node.figures()
    lease = client.lookup(NAMESPACE, tail.key, lease=True).lease
    assert lease is not None
    reserved = client.reserve(NAMESPACE, bytes(16), chain("half", 3))
    load_ = Load(node, 4)
    pids = {before["pid"]}
    try:
        for _ in range(5):
            calls = load_.calls
            upgrade(node)
            pids.add(node.figures()["pid"])
            until(lambda calls=calls: load_.calls > calls + 20 or load_.failures, "the load goes on")  # type: ignore[misc]
    finally:
        load_.end()
    assert load_.failures == []
    after = node.figures()
    assert len(pids) == 6
    assert after["node"] == before["node"]
    assert after["uptime_seconds"] > before["uptime_seconds"]
    assert after["counters"]["pages_committed"] >= before["counters"]["pages_committed"]
    assert (after["leases"], after["reservations"]) == (1, 1)
    client.commit(reserved)
    client.release(lease)
    assert client.lookup_tail(NAMESPACE, tail).tokens == 2
    for keys in load_.stored:
        for first in range(0, len(keys), 8):
            assert load(client, keys[first : first + 8]) == (8, 8)
    assert client.epoch == 1, "the connection was lost"
    assert client.stats()["clients"] == 1


@pytest.mark.process
def test_a_signal_upgrades_too_and_http_stays(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS, "--http-port", "0")
    client = make_client(node)
    store(client, chain("x", 3))
    url = node.log.partition("http=")[2].split()[0]
    before = client.stats()
    node.send(signal.SIGHUP)
    until(lambda: client.stats()["pid"] != before["pid"], "another process is the node", 30.0)
    assert node.wait() == 0, "the old process ended in error"
    http = HTTPConnection(url.removeprefix("http://"), timeout=10)
    http.request("GET", "/status")
    assert msgspec.json.decode(http.getresponse().read())["pid"] == client.stats()["pid"]
    http.close()
    assert load(client, chain("x", 3)) == (3, 3)
    end(node)


@pytest.mark.process
def test_a_node_that_was_upgraded_can_be_killed_and_is_back(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    upgrade(node)
    store(client, chain("y", 3))
    pid = node.figures()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not process_lives(pid), "the node is dead")
    node.wait()
    node.start()
    again = make_client(node)
    assert load(again, chain("x", 3)) == (3, 3)
    assert load(again, chain("y", 3)) == (3, 3)


# New processes that fail


class Candidate:
    """A process that wants to take over, step by step."""

    def __init__(self, node: NodeProcess) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10.0)
        self.sock.connect(str(node.socket))

    def greet(self) -> None:
        self.sock.sendall(coding.encode(messages.Hello(1, 1, "candidate", os.getpid())))
        self.sock.recv(1 << 16)

    def ask(self, version: int = 1) -> None:
        self.sock.sendall(coding.encode(messages.TakeOver(version, version, "9.9")))


@pytest.mark.process
@pytest.mark.parametrize("step", ["greeting", "question", "header", "part", "all", "nonsense"])
def test_a_new_process_that_ends_at_any_step_changes_nothing(
    node: NodeProcess, make_client: MakeClient, step: str
) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    before = client.stats()
    load_ = Load(node, 1)
    candidate = Candidate(node)
    candidate.greet()
    if step != "greeting":
        candidate.ask()
    if step in ("header", "part", "all", "nonsense"):
        candidate.sock.recv({"header": 4, "part": 40}.get(step, 1 << 24))
    if step == "nonsense":
        candidate.sock.sendall(coding.encode(messages.Release(1)))
        candidate.sock.recv(1 << 24)
    candidate.sock.close()
    calls = load_.calls
    until(lambda: load_.calls > calls + 10 or load_.failures, "the load goes on")
    load_.end()
    assert load_.failures == []
    after = client.stats()
    assert (after["pid"], after["node"]) == (before["pid"], before["node"])
    assert load(client, chain("x", 3)) == (3, 3)


@pytest.mark.process
def test_a_new_process_that_hangs_costs_a_few_seconds(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    candidate = Candidate(node)
    candidate.greet()
    candidate.ask()
    until(lambda: "the hand-over did not come about" in node.log, "the node gives it up")
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        candidate.sock.sendall(coding.encode(messages.Taken()))
    candidate.sock.close()
    assert node.figures()["pid"] == node.pid
    assert load(client, chain("x", 3)) == (3, 3)


@pytest.mark.process
def test_a_release_that_hands_over_in_another_way_is_refused(node: NodeProcess) -> None:
    candidate = Candidate(node)
    candidate.greet()
    candidate.ask(version=2)
    answer = coding.decode_answer(candidate.sock.recv(1 << 16)[4:])
    assert isinstance(answer, messages.Refused)
    assert answer.code == "version"
    assert "release 9.9 takes over by versions 2 to 2, this node" in answer.reason
    candidate.sock.close()


@pytest.mark.process
def test_new_processes_killed_at_random_moments_lose_nothing(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    load_ = Load(node, 2)
    command = [sys.executable, "-m", "ems.cli", "node", "--take-over", "--socket", str(node.socket)]
    drawn = random.Random(4)
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as candidate:
            # Around the end of its imports, when it asks and takes.
            time.sleep(drawn.uniform(0.3, 0.8))  # the random moment itself; any is right
            candidate.kill()
            candidate.wait()
        calls = load_.calls
        until(lambda calls=calls: load_.calls > calls + 10 or load_.failures, "the load goes on")  # type: ignore[misc]
        if load_.failures:
            break
    load_.end()
    if load_.failures:
        # It had taken over before it was killed: this is a node that was killed, whose pages are there.
        assert node.wait() == 0
        node.start()
        client = make_client(node)
    assert load(client, chain("x", 3)) == (3, 3)


@pytest.mark.process
def test_without_a_node_there_is_nothing_to_take_over(node: NodeProcess) -> None:
    with pytest.raises(PoolUnavailable, match="could be taken over"):
        Inheritance(node.directory / "nothing.sock")
    command = [sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(node.directory / "nothing.sock")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no pool node answers" in done.stderr


def test_settings_of_another_release_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    inheritance = Inheritance.__new__(Inheritance)
    inheritance.state = msgspec.structs.replace(empty_state(), config={"colour": "red"})
    with pytest.raises(ConfigError, match="does not know the node's settings"):
        inheritance._config()


ASKING = """
import sys
from pathlib import Path
from ems.cli import node

def asks(path):
    print(*sys.modules)
    raise SystemExit

node.Inheritance = asks
node._succeed(Path("nowhere"))
"""
"""A successor that says what it has loaded in the moment in which clients begin to wait for it."""


@pytest.mark.process
def test_a_successor_loads_what_it_needs_before_it_asks() -> None:
    done = subprocess.run([sys.executable, "-c", ASKING], check=True, capture_output=True, text=True)
    assert {"ems.pool.http.server", "uvicorn", "ems.pool.policy.forecast", "numpy"} <= set(done.stdout.split())
