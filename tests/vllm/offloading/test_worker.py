"""Transfers as vLLM submits them, between engine blocks and a real node's pages, with faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult

from ems.pool.client.answers import Lease
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import NO_PARENT, KeyChain, page_keys
from ems.pool.layout import REF_BYTES
from ems.transfers.checksums import PageSums
from ems.transfers.device import CpuDevice, Device, DevicePair
from ems.transfers.plan import CopyPlan
from ems.vllm.model import LocalPlane
from ems.vllm.offloading.worker import ChunkRun, EmsOffloadingWorker, PagesToLoad, PagesToStore
from ems.vllm.pages import plane_rows
from ems.vllm.planes import Plane, Portion
from ems.vllm.requests import Pages
from ems.vllm.saves import SaveJob
from tests.e2e.engines import Node, first, running_node, wait_for

BLOCKS = 40
CHUNK = 4
"""Blocks of a chunk."""
NAME = "t/m/f"
HEADS = 2


def chain_of(name: str, chunks: int) -> KeyChain:
    chain = KeyChain(f"{NAME}/{name}", 8)
    chain.extend(range(8 * chunks))
    return chain


class Engine:
    """Two layers whose pages are cut in two by heads, and one layer of a second group, with a worker."""

    def __init__(self, node: Node, seed: int) -> None:
        self.client = PoolClient(node.socket, "test")
        torch.manual_seed(seed)
        self.caches = {name: torch.randn(BLOCKS, HEADS, 4, 8) for name in ("layers.0", "layers.1", "layers.2")}
        planes = [Plane(f"{NAME}/0.0", shards=2), Plane(f"{NAME}/1.0", group=1)]
        local = [
            LocalPlane(0, planes[0], ("layers.0", "layers.1"), Portion(0, 2), (HEADS, HEADS)),
            LocalPlane(1, planes[1], ("layers.2",), Portion(), (HEADS,)),
        ]
        rows = plane_rows(local, self.caches, BLOCKS, CHUNK)
        self.planes, self.namespaces = planes, [row.namespace for row in rows]
        self.page_bytes = [row.rows.page_bytes * row.local.portion.count for row in rows]
        client = PoolClient(node.socket, "worker")
        self.worker = EmsOffloadingWorker(client, DevicePair(), rows, [0, 1], CHUNK, 5.0)
        self.jobs = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.client.close()

    def begin_store(self, name: str, block_ids: list[int], groups: tuple[int, ...] = (0, 1)) -> int:
        self.jobs += 1
        chain = chain_of(name, len(block_ids) // CHUNK)
        runs = [ChunkRun(0, NO_PARENT, chain.tails(0, len(chain)), groups)]
        sizes = [len(block_ids) * (group in groups) for group in (0, 1)]
        self.worker.submit_store(
            self.jobs, GPULoadStoreSpec(block_ids * len(groups), sizes, [0, 0]), PagesToStore(runs)
        )
        return self.jobs

    def ended(self, job: int) -> TransferResult:
        (result,) = first(lambda: [found] if (found := self.worker.get_finished()) else [], "the job ends")
        assert (result.job_id, result.success) == (job, True)
        return result

    def store(self, node: Node, name: str, block_ids: list[int]) -> None:
        """Whole chunks of both groups in the same blocks."""
        before = node.counters["pages_committed"]
        self.ended(self.begin_store(name, block_ids))
        pages = 3 * len(block_ids) // CHUNK
        wait_for(lambda: node.counters["pages_committed"] == before + pages, "the pages are committed")

    def lease(self, name: str, chunks: int) -> list[Lease]:
        leases = []
        for plane, namespace in zip(self.planes, self.namespaces, strict=True):
            keys = page_keys(chain_of(name, chunks).packed(0, chunks), plane.shards)
            hits = self.client.lookup(namespace, keys, lease=True)
            assert hits.count == chunks * plane.shards
            assert hits.lease is not None
            leases.append(hits.lease)
        return leases

    def load(self, name: str, node: str, refs: list[bytes], block_ids: list[int], index: int = 0) -> bool:
        """Whether the blocks, of which the first is number ``index`` of the request, have their chunks."""
        begin, end = index // CHUNK, -(-(index + len(block_ids)) // CHUNK)
        pages = [
            [
                Pages(
                    number,
                    begin,
                    chain_of(name, end).packed(begin, end),
                    refs[number][begin * plane.shards * REF_BYTES : end * plane.shards * REF_BYTES],
                )
            ]
            for number, plane in enumerate(self.planes)
        ]
        self.jobs += 1
        blocks = GPULoadStoreSpec(block_ids * 2, [len(block_ids)] * 2, [index] * 2)
        self.worker.submit_load(self.jobs, PagesToLoad(node, pages), blocks)
        self.ended(self.jobs)
        failed = self.worker.take_failed_loads()
        assert failed <= {self.jobs}
        return not failed

    def load_all(self, name: str, leases: list[Lease], block_ids: list[int], index: int = 0) -> bool:
        return self.load(name, leases[0].node, [lease.packed_refs for lease in leases], block_ids, index)

    def block(self, block_id: int) -> list[bytes]:
        return [tensor[block_id].numpy().tobytes() for tensor in self.caches.values()]


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "8MB", "--segment-size", "1MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


@pytest.fixture
def engines(node: Node) -> Iterator[tuple[Engine, Engine]]:
    pair = Engine(node, 1), Engine(node, 2)
    yield pair
    for engine in pair:
        engine.close()


def test_chunks_come_back_byte_for_byte_in_another_engine(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    ids = [7, 3, 9, 11, 2, 20, 21, 5]
    one.store(node, "a", ids)
    assert two.load_all("a", two.lease("a", 2), ids[::-1])
    for source, target in zip(ids, ids[::-1], strict=True):
        assert one.block(source) == two.block(target)
    assert node.counters["pages_corrupt"] == 0


@pytest.mark.parametrize(("index", "count"), [(1, 7), (3, 3), (4, 4), (0, 5)])
def test_a_load_may_begin_and_end_within_a_chunk(
    engines: tuple[Engine, Engine], node: Node, index: int, count: int
) -> None:
    one, two = engines
    ids = list(range(8))
    one.store(node, "a", ids)
    assert two.load_all("a", two.lease("a", 2), list(range(20, 20 + count)), index)
    for number in range(count):
        assert two.block(20 + number) == one.block(ids[index + number])


def test_a_chunk_of_one_group_alone_is_stored(engines: tuple[Engine, Engine], node: Node) -> None:
    one, _ = engines
    one.ended(one.begin_store("state", [6, 7, 8, 9], groups=(1,)))
    wait_for(lambda: node.counters["pages_committed"] == 1, "the page is committed")
    hits = one.client.lookup(one.namespaces[1], chain_of("state", 1).packed(0, 1))
    assert hits.count == 1


def test_blocks_that_others_get_are_read_no_more(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    began, go_on, made = threading.Event(), threading.Event(), []
    copy = SaveJob.copy

    def slow(job: SaveJob, device: Device, plan: CopyPlan, sums: PageSums) -> bool:
        made.append(copy(job, device, plan, sums))
        began.set()
        assert go_on.wait(10)
        return made[-1]

    monkeypatch.setattr(SaveJob, "copy", slow)
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    job = one.begin_store("b", list(range(8)), groups=(0,))
    assert began.wait(10)
    one.worker.wait({job})  # returns although the job has not ended
    go_on.set()
    one.ended(job)
    wait_for(lambda: node.counters["pages_committed"] == 1, "what was copied before is committed")
    wait_for(lambda: node.stats()["reservations"] == 0, "what was not is given back")
    assert made == [True, False]


def test_a_store_that_takes_a_moment_is_waited_for(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    monkeypatch.setattr("ems.vllm.offloading.worker.FLUSH_SECONDS", 30.0)
    for number in range(5):
        job = one.begin_store(f"flushed {number}", list(range(8)))
        one.worker.wait({job})
        one.ended(job)
    wait_for(lambda: node.counters["pages_committed"] == 30, "the pages are committed")


def test_stores_do_not_wait_for_the_output_of_a_step(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hands them out when the next step begins already; a flush of two that waited stored next to nothing."""
    monkeypatch.setattr("ems.vllm.saves.OUTPUT_SECONDS", 60.0)
    monkeypatch.setattr("ems.vllm.offloading.worker.FLUSH_SECONDS", 30.0)
    one, _ = engines
    one.worker.wait({one.begin_store(name, list(range(8))) for name in ("first", "second")})
    wait_for(lambda: node.counters["pages_committed"] == 12, "all pages are stored")


def test_a_load_from_a_node_that_is_gone_fails_whole(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    one.store(node, "a", list(range(8)))
    leases = two.lease("a", 2)
    node.kill()
    node.start()
    assert not two.load_all("a", leases, list(range(20, 28)))
    wait_for(lambda: node.stats()["bytes_touched"] == 8 << 20, "the memory is touched")

    def stored() -> bool:
        one.ended(one.begin_store("c", list(range(4))))
        return node.counters["pages_committed"] == 3

    wait_for(stored, "and the worker goes on")


def test_a_chunk_at_no_place_is_not_loaded(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    one.store(node, "a", list(range(8)))
    good = two.lease("a", 2)
    nowhere = [bytes(len(lease.packed_refs)) for lease in good]
    assert not two.load("a", good[0].node, nowhere, list(range(20, 28)))
    assert two.load_all("a", good, list(range(20, 28)))
