"""A pool that was made smaller or larger while it ran, over restarts and hand-overs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol.acts import Follow, Resize
from ems.pool.segments.plan import lay_out
from ems.pool.segments.side_file import SideFile
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.stored_pages import load, store

KIB = 1 << 10
SIZE = ("--size", "1MB", "--segment-size", "256KB")


@given(st.integers(0, 12), st.sets(st.integers(0, 14)), st.integers(1, 14))
def test_a_pool_has_as_many_segments_as_are_wanted_and_as_few_new_ones_as_it_can(
    found: int, gone: set[int], wanted: int
) -> None:
    count, stay = lay_out(found, gone, wanted)
    assert stay <= gone & set(range(count))
    assert count - len(stay) == wanted
    live = [number for number in range(found) if number not in gone]
    lost = [number for number in live if number >= count]
    assert lost == live[wanted:], "segments with pages go although others had no memory"
    assert count <= max(found, wanted)


def test_what_was_given_up_is_read_again_and_a_damaged_file_knows_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "given-up"
    known = SideFile(path, list[int])
    known.replace([1])
    assert SideFile(path, list[int]).value == [1]
    for damage in (b"", b"[1", b'["a"]', b"\xff"):
        path.write_bytes(damage)
        assert SideFile(path, list[int]).value == []


def resize(node: NodeProcess, size: int) -> None:
    client = PoolClient(node.socket, "administrator", administers=True)
    try:
        report = client.administer(Resize(size))
        until(lambda: client.administer(Follow(report["job"]))["done"], "the pool is resized")
    finally:
        client.close()


@pytest.mark.process
@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
def test_the_last_size_counts_where_none_is_given_and_the_given_one_where_it_is(
    make_node: MakeNode, clean: bool
) -> None:
    node = make_node(*SIZE)

    def again(*flags: str) -> list[bytes]:
        if clean:
            node.stop()
        else:
            node.kill()
        node._flags = flags
        node.start()
        node.wait_touched()
        client = node.client()
        try:
            return [key for key in keys if load(client, [key]) == (1, 1)]
        finally:
            client.close()

    node.wait_touched()
    client = node.client()
    keys = chain("x", 40)
    stored = store(client, keys)
    client.close()
    assert stored == 40
    resize(node, 512 * KIB)
    assert node.figures()["bytes_total"] == 512 * KIB
    survived = again()
    assert node.figures()["bytes_total"] == 512 * KIB
    assert survived
    assert again() == survived
    # Larger by a segment: those that were given up come back before new ones are made.
    assert again("--size", "768KB") == survived
    assert node.figures()["bytes_total"] == 768 * KIB
    assert len(list(node.directory.glob("segment-*"))) <= 4
    resize(node, 1536 * KIB)
    assert again() == survived
    assert node.figures()["bytes_total"] == 1536 * KIB
    assert again("--fresh", "--size", "512KB") == []
    assert node.figures()["bytes_total"] == 512 * KIB


@pytest.mark.process
def test_a_pool_that_was_made_smaller_stays_so_over_an_upgrade(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*SIZE)
    node.wait_touched()
    client = make_client(node)
    keys = chain("x", 40)
    store(client, keys)
    resize(node, 512 * KIB)
    there = [key for key in keys if load(client, [key]) == (1, 1)]
    node.upgrade()
    assert [key for key in keys if load(client, [key]) == (1, 1)] == there
    assert node.figures()["bytes_total"] == 512 * KIB
    resize(node, 1024 * KIB)
    node.wait_touched()
    assert store(client, chain("y", 30)) == 30
    assert load(client, chain("y", 30)) == (30, 30)


@pytest.mark.process
def test_an_empty_pool_has_the_size_that_it_was_given_last_and_its_log_says_so(make_node: MakeNode) -> None:
    node = make_node(*SIZE)

    def again(*flags: str) -> int:
        node.stop()
        assert not list(node.directory.glob("segment-*"))
        node._flags = flags
        node.start()
        return int(node.figures()["bytes_total"])

    node.wait_touched()
    resize(node, 512 * KIB)
    assert again() == 512 * KIB
    assert again() == 512 * KIB
    assert again(*SIZE) == 1024 * KIB
    node.wait_touched()
    resize(node, 512 * KIB)
    node.upgrade()
    assert "pool='512.0 KiB' segments=2" in node.log.rpartition("ready")[2]
    assert again() == 512 * KIB
    assert again("--fresh", *SIZE) == 1024 * KIB
    assert not (node.directory / "size").exists()
