"""A node that becomes the installed release in its own process, under load: no call fails, no page is lost."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from ems.errors import EmsError, PoolError, PoolRefused
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import Tail
from ems.pool.layout import FORMAT_VERSION
from ems.pool.node import restart
from ems.pool.node.restart import KeptOpen, Restart, check, kept_open
from ems.pool.protocol.acts import Drain, Pin, Resize
from ems.pool.segments.side_file import Pins, SideFile
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.stored_pages import NAMESPACE, load, store

FLAGS = ("--size", "16MB", "--segment-size", "1MB")


@pytest.fixture
def node(make_node: MakeNode) -> Iterator[NodeProcess]:
    running = make_node(*FLAGS)
    running.wait_touched()
    yield running
    assert "Traceback" not in running.log, running.log


def upgrade(node: NodeProcess) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(node.socket)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


class Load:
    """Clients that store and load without a pause; ``failures`` are calls that failed, and pages missing or wrong."""

    def __init__(self, node: NodeProcess, clients: int) -> None:
        self.failures: list[str] = []
        self.calls = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(node, number)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, node: NodeProcess, number: int) -> None:
        client = node.client(f"load {number}")
        try:
            for step in itertools.count():
                if self._stop.is_set():
                    break
                keys = chain(f"{number}/{step % 40}", 8)
                if store(client, keys) not in (0, 8):
                    self.failures.append("not all was stored")
                if load(client, keys) != (8, 8):
                    self.failures.append("not all was there, or its bytes were wrong")
                self.calls += 1
        except EmsError as error:
            self.failures.append(repr(error))
        finally:
            client.close()

    def goes_on(self) -> None:
        calls = self.calls
        until(lambda: self.calls > calls + 20 or self.failures, "the load goes on")

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.process
def test_three_upgrades_under_load_lose_nothing(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    tail = Tail(bytes(16), b"\1\0\0\0\2\0\0\0")
    store(client, [tail.key], tail=tail)
    before = node.figures()
    load_ = Load(node, 4)
    names = {before["node"]}
    try:
        for _ in range(3):
            load_.goes_on()
            done = upgrade(node)
            assert done.returncode == 0, done.stderr
            names.add(node.figures()["node"])
        load_.goes_on()
    finally:
        load_.end()
    assert load_.failures == []
    after = node.figures()
    assert len(names) == 4
    assert after["pid"] == before["pid"] == node.pid
    assert (after["leases"], after["reservations"]) == (0, 0)
    assert client.lookup_tail(NAMESPACE, tail).tokens == 2


@pytest.mark.process
def test_a_signal_upgrades_too_and_http_stays(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS, "--http-port", "0")
    client = make_client(node)
    store(client, chain("x", 3))
    url = node.log.partition("http=")[2].split()[0]
    node.upgrade()
    http = HTTPConnection(url.removeprefix("http://"), timeout=10)
    http.request("GET", "/health")
    assert http.getresponse().status == 200
    http.close()
    assert load(client, chain("x", 3)) == (3, 3)
    assert node.stop() == 0


@pytest.mark.process
def test_what_an_administrator_set_stays(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS, "--fresh")
    node.wait_touched()
    client = make_client(node)
    store(client, chain("x", 3))
    administrator = PoolClient(node.socket, administers=True)
    administrator.administer(Pin(NAMESPACE.name, chain("x", 1)[0], seconds=600.0))
    administrator.administer(Resize(8 << 20))
    until(lambda: node.figures()["bytes_total"] == 8 << 20, "the pool is smaller")
    administrator.administer(Drain())
    administrator.close()
    assert upgrade(node).returncode == 0
    figures = node.figures()
    assert (figures["bytes_total"], figures["draining"], figures["pinned"]) == (8 << 20, True, 1)
    assert load(client, chain("x", 3)) == (3, 3)


@pytest.mark.process
def test_what_is_held_for_too_long_ends_as_after_a_crash(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    lease = client.lookup(NAMESPACE, chain("x", 1)[0], lease=True).lease
    reserved = client.reserve(NAMESPACE, bytes(16), chain("half", 3))
    assert lease is not None
    assert upgrade(node).returncode == 0
    with pytest.raises(PoolError):
        client.commit(reserved)
    client.release(lease)
    figures = node.figures()
    assert (figures["leases"], figures["reservations"], figures["slots_resting"]) == (0, 0, 3)
    assert load(client, chain("x", 3)) == (3, 3)


@pytest.mark.process
def test_a_node_that_was_upgraded_can_be_killed_and_is_back(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    assert upgrade(node).returncode == 0
    store(client, chain("y", 3))
    node.kill()
    node.start()
    again = make_client(node)
    assert load(again, chain("x", 3)) == (3, 3)
    assert load(again, chain("y", 3)) == (3, 3)


@pytest.mark.process
def test_a_node_goes_on_where_the_new_release_cannot_start(
    make_node: MakeNode, make_client: MakeClient, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    node = make_node(*FLAGS, "--http-port", "0", "--http-token-file", str(token))
    client = make_client(node)
    store(client, chain("x", 3))
    before = node.figures()["node"]
    token.chmod(0o666)
    done = upgrade(node)
    assert done.returncode == 1
    assert "cannot start, so the node goes on as it is: " in done.stderr
    assert f"{token} can be read or changed by others" in done.stderr
    assert done.stderr.count("\n") == 1
    assert node.figures()["node"] == before
    assert load(client, chain("x", 3)) == (3, 3)
    token.chmod(0o600)
    assert upgrade(node).returncode == 0


@pytest.mark.process
def test_without_a_node_there_is_nothing_to_upgrade(node: NodeProcess) -> None:
    command = [sys.executable, "-m", "ems.cli", "upgrade", "--socket", str(node.directory / "nothing.sock")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no pool node answers" in done.stderr


# Whether the installed release can start


def says(script: str) -> list[str]:
    """A release that does ``script`` when it is asked."""
    return [sys.executable, "-c", script]


def test_a_release_that_can_start_says_what_it_is() -> None:
    script = f'print(\'{{"release": "9.9", "format": {FORMAT_VERSION}}}\')'
    assert check(says(script)).release == "9.9"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('error: --size is 3, expected more\\n')", "it is: --size is 3, expected more"),
        ("import sys; sys.exit(4)", "it ended with status 4"),
        ("print('hello')", "it does not say what it is"),
        ('print(\'{"release": "9.9", "format": 1}\')', "release 9.9 has segments of format 1, this node's have"),
    ],
)
def test_a_release_that_cannot_start_is_refused(script: str, said: str) -> None:
    with pytest.raises(PoolRefused, match=said):
        check(says(script))


def test_an_interpreter_that_is_gone_is_refused() -> None:
    with pytest.raises(PoolRefused, match="No such file"):
        check(["/nowhere/python"])


# What is kept open


def test_what_another_process_kept_open_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_open() is None
    others = msgspec.json.encode(KeptOpen(1, 0, 1, None, "/pool", "/pool/node.sock", 1, draining=False)).decode()
    for told in ("nonsense", others):
        monkeypatch.setenv("EMS_KEPT_OPEN", told)
        assert kept_open() is None
        assert "EMS_KEPT_OPEN" not in os.environ


def test_what_was_kept_open_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, listener = os.pipe()
    os.set_inheritable(lock, True)
    told = msgspec.json.encode(
        KeptOpen(os.getpid(), lock, listener, None, "/pool", "/pool/node.sock", 1, draining=False)
    )
    monkeypatch.setenv("EMS_KEPT_OPEN", told.decode())
    kept = kept_open()
    assert kept is not None
    assert stat.S_ISFIFO(os.fstat(kept.lock).st_mode)
    assert not os.get_inheritable(lock)
    for one in kept.descriptors:
        os.close(one)


# The way to a restart


async def test_a_node_restarts_when_nobody_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "check", lambda: restart.Check("9.9", 1))
    held = [True, True, True]
    way = Restart(lambda: bool(held and held.pop()), lambda: None)
    way.wish()
    way.wish()  # once is enough
    assert way.figures() == {"wished": True, "failure": ""}
    await way.due.wait()
    assert way.waits
    assert held == []


async def test_a_node_that_is_hindered_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["", "work is under way", "still"]

    def refuse() -> None:
        if reason := reasons.pop(0):
            raise PoolRefused(reason)

    monkeypatch.setattr(restart, "check", lambda: restart.Check("9.9", 1))
    way = Restart(lambda: False, refuse)
    way.wish()
    assert way._task is not None
    await way._task
    assert way.figures() == {"wished": False, "failure": "work is under way"}
    assert not way.waits
    with pytest.raises(PoolRefused, match="still"):
        way.wish()


# Pins


def test_pins_are_what_was_written_last(tmp_path: Path) -> None:
    path = tmp_path / "pins"
    assert SideFile(path, Pins).value == {}
    SideFile(path, Pins).replace({})
    assert not path.exists()
    pins = {"a": {b"k" * 16: 7.0, b"l" * 16: float("inf")}}
    SideFile(path, Pins).replace(pins)
    assert SideFile(path, Pins).value == pins
    SideFile(path, Pins).replace({})
    assert SideFile(path, Pins).value == {}
    path.write_bytes(b"nonsense")
    assert SideFile(path, Pins).value == {}
