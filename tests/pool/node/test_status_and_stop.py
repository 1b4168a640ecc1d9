"""``ems status`` and ``ems stop`` against real nodes, living, dead and made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ems.cli.status import summary_rows
from ems.pool.client.answers import Namespace
from ems.pool.protocol import coding, messages
from tests.kit.node import NodeProcess
from tests.pool.brain import chain
from tests.pool.client.scripted import node_that_says
from tests.pool.conftest import PAGE, MakeClient, MakeNode

pytestmark = pytest.mark.process


def ems(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ems.cli", *arguments],
        env={**os.environ, "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_sentence(ended: subprocess.CompletedProcess[str]) -> str:
    """What a command that failed said, which must be one line and no data."""
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def fill(node: NodeProcess, make_client: MakeClient) -> None:
    """Some of everything that status shows."""
    client, namespace = make_client(node), Namespace("tenant/Qwen/Qwen2.5-7B/0123", PAGE)
    client.commit(client.reserve(namespace, bytes(16), chain("x", 3)))
    client.reserve(namespace, bytes(16), chain("y", 2))
    client.lookup(namespace, b"".join(chain("x", 4)), lease=True)


def test_status_shows_the_pool_at_a_glance(node: NodeProcess, make_client: MakeClient) -> None:
    fill(node, make_client)
    ended = ems("status", "--socket", str(node.socket))
    assert (ended.returncode, ended.stderr) == (0, "")
    shown = {line.split()[0]: line for line in ended.stdout.splitlines() if line.strip()}
    assert node.figures()["node"][:12] in shown["node"]
    assert f"process {node.pid}" in shown["node"]
    assert "of 16.0 MiB" in shown["memory"]
    assert "100.0 %" in shown["touched"]
    assert "1 leases" in shown["clients"]
    assert "1 reservations" in shown["clients"]
    assert "3 of 4 keys found (75.0 %)" in shown["lookups"]
    assert "3 stored, 0 evicted" in shown["pages"]
    assert shown["tenant/Qwen/Qwen2.5-7B/0123"].split()[1:4] == ["3", "2", "14"]
    assert "4.0 KiB" in shown["tenant/Qwen/Qwen2.5-7B/0123"]


def test_status_as_json_is_what_the_node_said(node: NodeProcess) -> None:
    ended = ems("status", "-o", "json", EMS_SOCKET=str(node.socket))
    assert ended.returncode == 0
    figures = json.loads(ended.stdout)
    assert figures["pid"] == node.pid
    assert figures["bytes_total"] == 16 << 20
    assert {"namespaces", "leases", "reservations", "clients", "counters", "uptime_seconds"} <= figures.keys()


def test_shares_of_nothing_are_not_divided_by_it() -> None:
    rows = dict(summary_rows(EMPTY))
    assert "none yet" in rows["lookups"]


@pytest.mark.parametrize(
    ("seals", "said"),
    [({}, "no seal"), ({"": "3f9a12cd"}, "seal 3f9a12cd"), ({"a": "1", "b": "2"}, "seals of 2 tenants")],
)
def test_what_has_to_be_alike_on_all_hosts_of_a_cluster_is_shown(seals: dict[str, str], said: str) -> None:
    well = {"reading": True, "writing": True, "pages_written": 0, "pages_fetched": 0, "pages_dropped": 0}
    tier = {"name": "mooncake:/m.json", "tier_lends": 1 << 30, "tier_seals": seals, **well}
    assert dict(summary_rows({**EMPTY, "tiers": [tier]}))["tier"].startswith(
        f"mooncake:/m.json: lends 1.0 GiB, {said}, "
    )


EMPTY = {
    "node": "0" * 32,
    "release": "1.0",
    "pid": 1,
    "autostarted": True,
    "uptime_seconds": 93784.0,
    "clients": 1,
    "leases": 0,
    "reservations": 0,
    "bytes_total": 0,
    "bytes_touched": 0,
    "bytes_used": 0,
    "bytes_reserved": 0,
    "slots_resting": 0,
    "segments": 0,
    "segments_assigned": 0,
    "connections_refused": 0,
    "namespaces": [],
    "counters": dict.fromkeys(
        [
            "lookups",
            "keys_looked_up",
            "keys_hit",
            "pages_committed",
            "pages_evicted",
            "refused_no_space",
            "refused_not_touched",
            "refused_share",
            "reservations_expired",
        ],
        0,
    ),
}


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_no_node_is_one_sentence(tmp_path: Path, verb: str) -> None:
    said = one_sentence(ems(verb, "--socket", str(tmp_path / "nobody")))
    assert f"no pool node answers on {tmp_path}/nobody" in said


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_a_killed_node_is_one_sentence(make_node: MakeNode, verb: str) -> None:
    node = make_node()
    node.kill()
    assert "no pool node answers on" in one_sentence(ems(verb, "--socket", str(node.socket)))


def test_a_frozen_node_is_one_sentence(make_node: MakeNode) -> None:
    node = make_node()
    node.send(signal.SIGSTOP)
    with ThreadPoolExecutor() as both:
        for ended in both.map(lambda verb: ems(verb, "--socket", str(node.socket)), ["status", "stop"]):
            assert "did not greet in time" in one_sentence(ended)
    assert node.returncode is None


def test_stop_ends_the_node_and_waits_for_it(make_node: MakeNode) -> None:
    node = make_node()
    ended = ems("stop", "--socket", str(node.socket))
    assert (ended.returncode, ended.stdout) == (0, "")
    assert f"stopped the node on {node.socket} (process {node.pid})" in ended.stderr
    assert node.wait() == 0
    assert not node.directory.exists()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2hi", coding.encode(messages.Done())],
    ids=["http", "msgpack", "ems"],
)
@pytest.mark.parametrize("verb", ["status", "stop"])
def test_something_that_is_no_node_is_left_alone(tmp_path: Path, verb: str, answer: bytes) -> None:
    with node_that_says(tmp_path / "s", answer):
        assert one_sentence(ems(verb, "--socket", str(tmp_path / "s")))


def test_only_the_process_that_listens_is_stopped(tmp_path: Path) -> None:
    """A server that claims to be another process does not get that one killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        figures = messages.Figures({"pid": victim.pid})
        welcome = messages.Welcome(1, "0" * 32, "1.0", autostarted=False, segments=0)
        answers = coding.encode(welcome), coding.encode(figures)
        with node_that_says(tmp_path / "s", *answers):
            said = one_sentence(ems("stop", "--socket", str(tmp_path / "s")))
        assert "process" in said
        assert victim.poll() is None
        victim.kill()
