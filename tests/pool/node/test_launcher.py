"""A node is there when an engine needs it: one, however many ask, and a reason when there cannot be one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ems.config import NodeConfig
from ems.errors import ConfigError, PoolUnavailable
from ems.pool.client.pool_client import PoolClient
from ems.pool.node import launcher
from ems.pool.node.launcher import ensure_node, node_listens
from ems.pool.processes import process_lives
from ems.pool.segments.folder import starting
from tests.kit.waiting import until

pytestmark = pytest.mark.process

STARTER = """
import sys
from pathlib import Path
from ems.config import NodeConfig
from ems.pool.node.launcher import ensure_node


folder = Path(sys.argv[1])
sys.stdin.readline()
config = NodeConfig(directory=folder, socket=folder / "node.sock", size=1 << 20, http_port=None)
print("started" if ensure_node(config) else "found")
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder for nodes, all of which are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        yield Path(path)
        for socket_path in Path(path).rglob("*.sock"):
            pid = pid_of(socket_path)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not process_lives(pid), "the node is gone")  # type: ignore[misc]


def config_in(directory: Path, **settings: object) -> NodeConfig:
    given = {"directory": directory, "socket": directory / "node.sock", "size": 1 << 20, "http_port": None}
    return NodeConfig(**{**given, **settings})  # type: ignore[arg-type]


def pid_of(path: Path) -> int:
    client = PoolClient(path)
    try:
        pid = client.stats()["pid"]
    finally:
        client.close()
    assert isinstance(pid, int)
    return pid


def stop(path: Path) -> None:
    pid = pid_of(path)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not process_lives(pid), "the node stops")


def test_it_starts_a_node_once_and_the_node_is_nobodys_child(home: Path) -> None:
    config = config_in(home / "pool")
    assert ensure_node(config)
    assert not ensure_node(config)
    pid = pid_of(config.socket)
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[1]) != os.getpid()
    assert int(stat[3]) != os.getsid(0), "it would end with the terminal"
    client = PoolClient(config.socket)
    client.connect()
    assert client.autostarted
    client.close()


def test_a_socket_that_is_named_alone_gets_no_node_in_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of a node with a folder of its own, which is away for a moment."""
    monkeypatch.delenv("EMS_DIR", raising=False)
    monkeypatch.setenv("EMS_SOCKET", str(home / "node.sock"))
    with pytest.raises(PoolUnavailable, match="which folder it is to have is not known"):
        ensure_node(NodeConfig(http_port=None, autostarted=True))


def test_eight_processes_that_start_at_once_get_one_node(home: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(home / "pool")]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    said = [starter.communicate(timeout=60)[0].strip() for starter in starters]
    assert sorted(said) == ["found"] * 7 + ["started"]
    assert len(list((home / "pool").glob("segment-*"))) == 1
    assert "error" not in (home / "pool" / "node.log").read_text()


def test_a_stopped_node_leaves_nothing_and_another_can_be_started(home: Path) -> None:
    config = config_in(home / "pool")
    ensure_node(config)
    stop(config.socket)
    assert list(home.iterdir()) == []
    assert ensure_node(config)


def test_a_killed_node_is_replaced(home: Path) -> None:
    config = config_in(home / "pool")
    ensure_node(config)
    pid = pid_of(config.socket)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not process_lives(pid), "the node is dead")
    assert ensure_node(config)
    assert pid_of(config.socket) != pid


def test_a_node_that_is_leaving_is_waited_for(home: Path) -> None:
    config = config_in(home / "pool", size=256 << 20)
    ensure_node(config)
    pid = pid_of(config.socket)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not node_listens(config.socket), "it listens no more")
    assert ensure_node(config)
    assert pid_of(config.socket) != pid


def test_a_relative_folder_means_the_same_folder_to_the_node(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert ensure_node(config_in(Path("pool")))
    assert node_listens(home / "pool" / "node.sock")


@pytest.mark.parametrize("given", ["settings", "environment"])
def test_a_relative_tier_means_the_same_folder_to_the_node(
    home: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("EMS_TIER", "dir:below?size=1MB" if given == "environment" else "")
    (home / "below").mkdir(mode=0o700)
    config = config_in(home / "pool", tiers=("dir:below?size=1MB",) if given == "settings" else ())
    assert ensure_node(config)
    client = PoolClient(config.socket)
    figures = client.stats()
    client.close()
    assert f"'dir:{home}/below'" in str(figures["tiers"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"size": 1 << 50}, "does not fit"), ({"size": 1 << 30, "segment_size": 4096}, "give a larger --segment-size")],
)
def test_why_a_node_cannot_start_is_the_callers_error(home: Path, settings: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ensure_node(config_in(home / "pool", **settings))
    assert str(caught.value).startswith("the pool node could not start: ")
    assert "Traceback" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_the_callers_error() -> None:
    with pytest.raises(ConfigError, match="cannot use /proc/ems for a pool node"):
        ensure_node(config_in(Path("/proc/ems")))


def test_a_starter_that_never_gets_its_turn_gives_up_in_time(home: Path) -> None:
    with starting(home / "pool"):
        begin = time.monotonic()
        with pytest.raises(PoolUnavailable, match="within 0 s"):
            ensure_node(config_in(home / "pool"), timeout=0.2)
        assert time.monotonic() - begin < 10.0


def test_a_port_in_use_does_not_keep_an_engine_from_its_node(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert ensure_node(config_in(home / "pool", http_port=taken.getsockname()[1]))
    assert node_listens(home / "pool" / "node.sock")


def test_an_interrupted_starter_leaves_no_node_that_nobody_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    detach = launcher._detach

    def remember(command: list[str], log: IO[bytes]) -> int:
        started.append(detach(command, log))
        return started[0]

    def interrupt_when_started(_: Path) -> bool:
        if started:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(launcher, "_detach", remember)
    monkeypatch.setattr(launcher, "node_listens", interrupt_when_started)
    with pytest.raises(KeyboardInterrupt):
        ensure_node(config_in(home / "pool"))
    (pid,) = started
    until(lambda: not process_lives(pid), "the node ends")
    assert not list((home / "pool").glob("segment-*"))
