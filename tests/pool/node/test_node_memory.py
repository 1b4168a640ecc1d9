"""What a node costs beside its segments, and that nobody pays for the first touch of these."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ems.config import NodeConfig
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.pool_node import Node
from ems.pool.pages import Outcome
from tests.kit.waiting import until
from tests.pool.brain import key
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.mounts import tmpfs
from tests.pool.stored_pages import store_unwritten

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def resident(pid: int, *kinds: str) -> int:
    """Bytes of memory of ``kinds`` (RssAnon, RssFile, RssShmem) that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in kinds)


def in_memory(view: memoryview) -> bool:
    """Whether every memory page under ``view`` exists, as the kernel sees it."""
    anchor = ctypes.c_char.from_buffer(view)
    start = ctypes.addressof(anchor) // mmap.PAGESIZE * mmap.PAGESIZE
    end = ctypes.addressof(anchor) + len(view)
    count = -(-(end - start) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    assert _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), found) == 0
    return all(byte & 1 for byte in found)


def store_prompts(client: PoolClient, namespace: Namespace, chains: int, length: int) -> int:
    """Store ``chains`` prompts of ``length`` blocks; how many pages found room."""
    prompts = ([key((number, block)) for block in range(length)] for number in range(chains))
    return sum(store_unwritten(client, namespace, keys) for keys in prompts)


def test_a_node_is_small_at_its_start(make_node: MakeNode) -> None:
    node = make_node("--size", "1GB", "--http-port", "0")
    until(lambda: "http://" in node.log, "it serves HTTP")
    assert resident(node.pid, "RssAnon", "RssFile") < 120 * MIB


async def test_who_comes_first_finds_memory_that_was_touched() -> None:
    """Looked at before the loop goes on: no thread can have told the node meanwhile."""
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as home:
        node = Node(NodeConfig(directory=Path(home), socket=Path(home) / "node.sock", http_port=None, size=96 * MIB))
        try:
            node.start()
            assert node.core.stats()["bytes_touched"] == 64 * MIB
        finally:
            node.close()


@pytest.mark.slow
def test_a_page_costs_the_node_little(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "64MB", "--segment-size", "32MB")
    node.wait_touched()
    client, namespace = make_client(node), Namespace("tiny", 64)
    before = resident(node.pid, "RssAnon")
    stored = store_prompts(client, namespace, 200, 1000)
    assert stored == 200_000
    assert (resident(node.pid, "RssAnon") - before) / stored < 400
    for number in range(200):
        lease = client.lookup(namespace, b"".join(key((number, block)) for block in range(1000)), lease=True).lease
        assert lease is not None
        client.release(lease)
    assert (resident(node.pid, "RssAnon") - before) / stored < 400, "reading costs memory"


def test_the_first_saver_gets_touched_memory_or_none(make_node: MakeNode, make_client: MakeClient) -> None:
    page = 256 << 10
    node = make_node("--size", "2GB", "--segment-size", "128MB")
    client, namespace = make_client(node), Namespace("first", page)
    outcomes: Counter[int] = Counter()

    def reserve() -> bool:
        reserved = client.reserve(namespace, bytes(16), [key((outcomes.total(), block)) for block in range(40)])
        outcomes.update(reserved.outcomes)
        segments = client.segments(reserved.epoch)
        for ref in reserved.granted.values():
            assert in_memory(segments.page(ref, page)), f"{ref} was handed out untouched"
        return outcomes[Outcome.GRANTED] > 400

    until(reserve, "100 MiB were handed out", 30.0)
    # A machine that touches faster than this client asks may refuse none; a refusal has this one reason only.
    assert outcomes.keys() <= {Outcome.GRANTED, Outcome.NOT_TOUCHED}


def test_all_memory_is_touched_in_the_end_and_handed_out(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "32MB", "--segment-size", "8MB")
    client, namespace = make_client(node), Namespace("all", 1 << 20)
    node.wait_touched()
    until(lambda: "segments touched" in node.log, "the node says so")
    reserved = client.reserve(namespace, bytes(16), [key(block) for block in range(40)])
    assert len(reserved.granted) == 4 * 7
    assert set(reserved.outcomes) == {Outcome.GRANTED, Outcome.NO_SPACE}


async def pool_where_memory_runs_out(parent: Path, fill: Callable[[], object]) -> tuple[int, dict[str, Any]]:
    """A node of two segments of 8 MiB, of which the second is not to be had: pages handed out, figures."""
    directory = parent / "pool"
    config = NodeConfig(directory=directory, socket=directory / "node.sock", size=16 * MIB, segment_size=8 * MIB)
    node = Node(config)
    fill()
    node.start()
    client = PoolClient(config.socket)
    try:
        return await asyncio.to_thread(reserve_all_there_is, client, Namespace("a", MIB))
    finally:
        client.close()
        node.close()


async def test_memory_that_runs_out_makes_the_pool_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1]
    allocate = os.posix_fallocate

    def scarce(descriptor: int, start: int, length: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        allocate(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as home:
        handed_out, figures = await pool_where_memory_runs_out(Path(home), lambda: None)
    assert handed_out == 7
    assert (figures["bytes_touched"], figures["bytes_total"]) == (8 * MIB, 16 * MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; the test above covers the same with made-up memory")
async def test_a_file_system_that_runs_full_makes_the_pool_smaller(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=24m") as small:
        filler = small / "filler"
        handed_out, figures = await pool_where_memory_runs_out(small, lambda: filler.write_bytes(bytes(12 * MIB)))
        assert sorted(small.iterdir()) == [filler], "the node left something behind"
    assert handed_out == 7
    assert (figures["bytes_touched"], figures["bytes_total"]) == (8 * MIB, 16 * MIB)


def reserve_all_there_is(client: PoolClient, namespace: Namespace) -> tuple[int, dict[str, Any]]:
    """Reserve pages until the node says that there is no more memory to come."""
    stored = 0

    def full() -> bool:
        nonlocal stored
        reserved = client.reserve(namespace, bytes(16), [key((stored, block)) for block in range(32)])
        stored += len(reserved.granted)
        return Outcome.NO_SPACE in reserved.outcomes

    until(full, "the pool is full")
    return stored, client.stats()
