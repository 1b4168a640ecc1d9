"""How a node starts, refuses to start, and stops: quickly, in one sentence, without a trace."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ems.cli import run
from ems.errors import ConfigError
from ems.pool.client.answers import Namespace
from ems.pool.segments.folder import Folder
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import PAGE, MakeClient, MakeNode
from tests.pool.mounts import tmpfs

pytestmark = pytest.mark.process


def refused_start(*flags: str) -> tuple[int, str]:
    """Exit status and the one line of a node that does not start."""
    ended = subprocess.run(
        [sys.executable, "-m", "ems.cli", "node", *flags], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("error: ")
    assert not lines[0].endswith(".")
    return ended.returncode, lines[0]


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty folder in shared memory."""
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        yield Path(path)


def test_it_listens_before_its_memory_is_touched() -> None:
    """So its start takes the same whatever the pool's size; benchmarks/start.py measures it."""
    with NodeProcess("--size", "8GB", "--http-port", "0") as node:
        assert node.figures()["bytes_total"] == 8 << 30
        assert node.figures()["bytes_touched"] < 8 << 30, "the pool was touched before the node listened"


def test_only_its_user_can_reach_it(make_node: MakeNode) -> None:
    node = make_node()
    modes = {entry.name: stat.S_IMODE(entry.lstat().st_mode) for entry in node.directory.iterdir()}
    assert stat.S_IMODE(node.directory.stat().st_mode) == 0o700
    assert modes["node.sock"] == 0o600
    assert len(modes) == 3 + 256
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_nothing_behind(make_node: MakeNode, make_client: MakeClient, number: signal.Signals) -> None:
    node = make_node("--size", "64MB", "--http-port", "0")
    client = make_client(node)
    client.reserve(Namespace("a", PAGE), bytes(16), chain("x", 2))
    node.send(number)
    assert node.wait() == 0
    assert not node.directory.exists()
    assert "Traceback" not in node.log


def test_a_folder_with_something_else_in_it_stays(make_node: MakeNode) -> None:
    node = make_node()
    (node.directory / "note").touch()
    (node.directory / "segment-1").touch()
    assert node.stop() == 0
    assert sorted(entry.name for entry in node.directory.iterdir()) == ["note", "segment-1"]


def test_a_stop_while_memory_is_touched_is_obeyed_at_once(make_node: MakeNode) -> None:
    node = make_node("--size", "8GB")
    assert node.stop() == 0
    assert "segments touched" not in node.log


def test_a_new_node_takes_over_from_a_killed_one(make_node: MakeNode) -> None:
    node = make_node()
    before = node.figures()
    node.kill()
    assert {"node.lock", "segment-00000"} <= {entry.name for entry in node.directory.iterdir()}
    node.start()
    assert node.figures()["node"] != before["node"]
    assert node.stop() == 0
    assert not node.directory.exists()


def test_a_second_node_in_a_folder_is_refused(make_node: MakeNode) -> None:
    node = make_node()
    status, said = refused_start("--no-http", "--dir", str(node.directory))
    assert status == 3
    assert f"another node is already listening on {node.socket}" in said
    with pytest.raises(ConfigError, match=rf"a node is already running in {node.directory} \(process {node.pid}\)"):
        Folder(node.directory, patience=0.0)
    assert node.figures()["pid"] == node.pid


def test_a_second_node_on_a_socket_is_refused(make_node: MakeNode, home: Path) -> None:
    node = make_node()
    status, said = refused_start("--no-http", "--dir", str(home / "b"), "--socket", str(node.socket), "--size", "1MB")
    assert status == 3
    assert f"another node is already listening on {node.socket}" in said
    assert node.figures()["pid"] == node.pid
    assert list(home.iterdir()) == []


def test_a_file_at_the_socket_is_not_removed(home: Path) -> None:
    precious = home / "precious"
    precious.write_text("keep me")
    status, said = refused_start("--no-http", "--dir", str(home / "pool"), "--socket", str(precious), "--size", "1MB")
    assert status == 3
    assert "is no socket" in said
    assert precious.read_text() == "keep me"


def test_a_socket_path_that_is_too_long_is_refused(home: Path) -> None:
    status, said = refused_start("--no-http", "--dir", str(home / ("x" * 120)))
    assert status == 2
    assert "longer than the 107 bytes" in said


def test_a_port_in_use_is_refused(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused_start("--http-port", str(port), "--dir", str(home / "pool"), "--size", "1MB")
    assert status == 3
    assert f"cannot serve HTTP on 127.0.0.1:{port}" in said
    assert "--no-http" in said


def test_a_second_node_in_the_same_folder_is_told_of_the_first_and_not_of_its_port(make_node: MakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    first = make_node("--http-port", str(port), "--size", "1MB")
    status, said = refused_start("--http-port", str(port), "--dir", str(first.directory), "--size", "1MB")
    assert status == 3
    assert f"another node is already listening on {first.socket}" in said


def test_a_node_of_an_engine_takes_another_port_where_its_own_is_taken(make_node: MakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = make_node("--http-port", str(port), "--size", "1MB", "--autostarted")
        until(lambda: "http://127.0.0.1:" in node.log, "the node says where it serves HTTP")
        assert f"http://127.0.0.1:{port} " not in node.log


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--size", "9999TB"), "does not fit in"),
        (("--size", "3KB"), "smaller than a memory page"),
        (("--size", "1MB", "--segment-size", "3KB"), "smaller than a memory page"),
        (("--size", "1GB", "--segment-size", "4KB"), "expected at most 4096"),
    ],
)
def test_a_pool_that_cannot_be_made_is_refused(home: Path, flags: tuple[str, ...], reason: str) -> None:
    status, said = refused_start("--no-http", "--dir", str(home / "pool"), *flags)
    assert status == 3
    assert reason in said
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--size", "huge"), "expected a number above 0 with a unit"),
        (("--size", "0"), "expected a number above 0"),
        (("--size", "4095"), "expected a unit such as"),
        (("--size", "1MB", "--segment-size", "2MB"), "is larger than the pool"),
        (("--high-watermark", "1.5"), "expected a share above 0 and at most 1"),
        (("--eviction-ratio", "0"), "expected a share above 0 and at most 1"),
        (("--http-port", "70000"), "expected 0 to 65535"),
    ],
)
def test_a_wrong_setting_is_a_mistake_in_usage(
    home: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    assert run(["node", "--dir", str(home / "pool"), *flags]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert reason in printed.err
    assert printed.out == ""
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    status, said = refused_start("--no-http", "--dir", "/proc/ems")
    assert status == 3
    assert "cannot use /proc/ems for a pool node" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; test_arena covers the same with a made-up one")
def test_a_shared_memory_file_system_that_is_too_small_is_refused() -> None:
    with ExitStack() as stack:
        # A socket's path must be short.
        tmp_path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        small = stack.enter_context(tmpfs(tmp_path / "small", "size=8m"))
        locked = stack.enter_context(tmpfs(tmp_path / "locked", "size=8m,ro"))
        status, said = refused_start("--no-http", "--dir", str(small / "pool"), "--size", "64MB")
        assert status == 3
        assert f"a pool of 64.0 MiB does not fit in {small}/pool, which has 8.0 MiB free" in said
        assert list(small.iterdir()) == []
        status, said = refused_start("--no-http", "--dir", str(locked / "pool"), "--size", "1MB")
        assert status == 3
        assert "Read-only file system" in said
        with NodeProcess(parent=small) as node:
            assert 3.9 < node.figures()["bytes_total"] / (1 << 20) <= 4, "half of what is free"
