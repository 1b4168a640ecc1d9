"""The file of experience: whole or not believed, written by nodes that stop, read by nodes that start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ems.config import NodeConfig
from ems.pool.core.index import Index
from ems.pool.node import experience_file as experience
from ems.pool.node.experience_file import ExperienceFile, ExperienceKeeper
from ems.pool.node.pool_node import Node
from ems.pool.policy.experience import Experience
from ems.pool.policy.seam import make_policy
from ems.pool.segments.folder import EXPERIENCE_NAME
from ems.testing.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.node.test_survival import NAMESPACE, back, load, store

ONE = Experience("a", bytes(16), b"\1", b"\0\0", b"learned")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path)
    assert file.read() == {}
    file.write([ONE])
    assert file.read() == {"a": ONE}
    assert [entry.name for entry in tmp_path.iterdir()] == [EXPERIENCE_NAME]
    assert (tmp_path / EXPERIENCE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("raw", "told"), [(b"EMSEXP99....", "another release"), (b"EMSEXP01....nonsense", "damaged")])
def test_a_file_that_cannot_be_used_is_left_out_with_one_line(tmp_path: Path, raw: bytes, told: str) -> None:
    (tmp_path / EXPERIENCE_NAME).write_bytes(raw)
    with capture_logs() as lines:
        assert ExperienceFile(tmp_path).read() == {}
    assert len(lines) == 1
    assert told in lines[0]["reason"]


def test_a_file_that_cannot_be_written_is_said_once_and_what_was_there_stays(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path)
    file.write([ONE])
    missing = ExperienceFile(tmp_path / "missing")
    with capture_logs() as lines:
        missing.write([ONE])
        missing.write([ONE])
    assert len(lines) == 1
    assert file.read() == {"a": ONE}


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / f"{EXPERIENCE_NAME}.4711.new").write_bytes(b"half")
    ExperienceFile(tmp_path).write([ONE])
    assert [entry.name for entry in tmp_path.iterdir()] == [EXPERIENCE_NAME]


async def test_it_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience, "EVERY_SECONDS", 0.01)
    index = Index(make_policy("forecast"))
    index.publish([index.insert(bytes([1]) * 16, bytes(20), bytes(16))])
    keeper = ExperienceKeeper(tmp_path, asyncio.get_running_loop(), lambda: [("a", index)])
    keeper.start()
    written = ExperienceFile(tmp_path)
    await asyncio.to_thread(until, written.read, "it is written")
    keeper.leave()
    assert written.read()["a"].keys == bytes([1]) * 16
    keeper.stop()


async def test_a_node_without_pages_leaves_no_experience(tmp_path: Path) -> None:
    config = NodeConfig(directory=tmp_path / "pool", socket=tmp_path / "sock", size=1 << 20, http_port=None)
    node = Node(config)
    node.start()
    node.close()
    assert not (tmp_path / "pool").exists()


@pytest.mark.process
def test_uses_are_known_after_a_stop(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "4MB", "--segment-size", "512KB")
    node.wait_touched()
    client, keys = make_client(node), chain("x", 50)
    store(client, keys)
    for _ in range(3):
        assert load(client, keys[:5]) == (5, 5)
    node.stop()
    known = ExperienceFile(node.directory).read()[NAMESPACE.name]
    assert sorted(known.uses) == [1] * 45 + [4] * 5
    node.start()
    back(node, client)
    assert "with_experience=1" in node.log
    node.stop()
    assert ExperienceFile(node.directory).read()[NAMESPACE.name].uses == known.uses


@pytest.mark.process
def test_a_damaged_file_costs_nothing_but_itself(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "4MB", "--segment-size", "512KB")
    node.wait_touched()
    client, keys = make_client(node), chain("x", 50)
    store(client, keys)
    node.stop()
    path = node.directory / EXPERIENCE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    node.start()
    back(node, client)
    assert load(client, keys) == (50, 50)
    assert "it learns anew" in node.log
