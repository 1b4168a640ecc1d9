"""``ems status``, ``ems stop`` and ``ems bench pool`` as a user calls them, on a real node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.cli.status import summary_rows
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from tests.kit.node import NodeProcess
from tests.kit.waiting import until

pytestmark = pytest.mark.process


def ems(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ems.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--size", "8MB") as running:
        running.wait_touched()
        yield running


def test_status_shows_what_the_pool_holds(node: NodeProcess) -> None:
    client = PoolClient(node.socket, "test")
    namespace = Namespace("default/model/layout", 4096)
    client.commit(client.reserve(namespace, bytes(16), [b"a" * 16, b"b" * 16]))
    client.lookup(namespace, b"a" * 16 + b"c" * 16)

    table = ems("status", "--socket", str(node.socket))
    figures = json.loads(ems("status", "--socket", str(node.socket), "-o", "json").stdout)
    client.close()

    assert table.returncode == 0
    assert "default/model/layout" in table.stdout
    assert "1 of 2 keys found (50.0 %)" in table.stdout
    assert figures["namespaces"][0]["pages"] == 2
    assert dict(summary_rows(figures))["pages"] == "2 stored, 0 evicted"


def test_stop_ends_the_node_and_leaves_nothing(node: NodeProcess) -> None:
    done = ems("stop", "--socket", str(node.socket))

    assert (done.returncode, done.stdout) == (0, "")
    assert "stopped the node" in done.stderr
    assert not list(node.directory.glob("segment-*"))
    assert not node.socket.exists()


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_without_a_node_there_is_one_sentence(verb: str, tmp_path: Path) -> None:
    done = ems(verb, "--socket", str(tmp_path / "node.sock"))

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no pool node answers on")
    assert len(done.stderr.splitlines()) == 1


def test_bench_pool_measures_a_node_of_its_own_and_leaves_nothing() -> None:
    shared_memory = Path("/dev/shm")
    before = {path for path in shared_memory.iterdir() if path.name.startswith("ems-bench-")}
    done = ems("bench", "pool", "--rounds", "1", "--pages", "768KB", "--keys", "1,16", "--lookups", "20", "-o", "json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (bandwidth,) = report["bandwidth"]
    assert bandwidth["page_bytes"] == 768 << 10
    assert all(bandwidth[name] > 0 for name in ("memcpy", "memcpy_to_slots", "save", "memcpy_from_slots", "load"))
    assert [(row["keys"], row["lease"]) for row in report["lookups"]] == [
        (1, False),
        (16, False),
        (1, True),
        (16, True),
    ]
    assert all(0 < row["p50"] <= row["p90"] <= row["p99"] for row in report["lookups"])
    assert {path for path in shared_memory.iterdir() if path.name.startswith("ems-bench-")} == before


def test_bench_pool_takes_its_pages_out_of_a_node_of_others() -> None:
    with NodeProcess("--size", "256MB") as node:
        flags = ("--rounds", "1", "--pages", "768KB", "--keys", "1", "--lookups", "2", "--socket", str(node.socket))
        done = ems("bench", "pool", *flags)
        assert done.returncode == 0, done.stderr
        command = [sys.executable, "-m", "ems.cli", "bench", "pool", *flags[2:], "--rounds", "1000"]
        cut_off = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: node.figures()["counters"]["pages_committed"] > 400, "the benchmark has saved pages")
        cut_off.send_signal(signal.SIGINT)
        assert cut_off.communicate(timeout=60)[0] == ""
        assert cut_off.returncode == 130
        until(lambda: not sum(row["pages"] for row in node.figures()["namespaces"]), "no page is left")


@pytest.mark.parametrize(
    "flags", [("--pages", "banana"), ("--pages", "1KB"), ("--rounds", "0"), ("--keys", "0"), ("--keys", "1GB")]
)
def test_bench_pool_refuses_what_cannot_be_measured(flags: tuple[str, str]) -> None:
    done = ems("bench", "pool", *flags)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_upgrade_says_to_scripts_what_was_and_what_is(node: NodeProcess) -> None:
    before = node.figures()
    done = ems("upgrade", "--socket", str(node.socket), "-o", "json")
    after = node.figures()
    ems("stop", "--socket", str(node.socket))  # it may be another process than the one that was started

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "socket": str(node.socket),
        "pid": after["pid"],
        "release": after["release"],
        "before": {"pid": before["pid"], "release": before["release"]},
    }
    assert len(done.stderr.splitlines()) == 1
