"""Chunks between engine blocks and a real node's pages, with faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import blake2b

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)

from ems.pool.checksum import page_checksum
from ems.pool.client.answers import Lease, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, NO_PARENT
from ems.pool.layout import REF_BYTES
from ems.transfers.device import CpuDevice, DevicePair
from ems.vllm.offloading.mover import EmsOffloadingWorker, group_rows, page_sizes_of
from ems.vllm.offloading.transfer import PagesToLoad, PagesToStore
from tests.e2e.engines import Node, first, running_node, wait_for

BLOCKS = 40
CHUNK = 4


def key(name: str, number: int) -> bytes:
    return blake2b(b"%s %d" % (name.encode(), number), digest_size=KEY_BYTES).digest()


def keys(name: str, count: int) -> bytes:
    return b"".join(key(name, number) for number in range(count))


def parents(name: str, count: int) -> bytes:
    return NO_PARENT * bool(count) + keys(name, count - 1 if count else 0)


class Engine:
    """Two layers of full attention, of which one is padded, and one layer of a second group, with a worker."""

    def __init__(self, node: Node, seed: int) -> None:
        self.client = PoolClient(node.socket, "test")
        torch.manual_seed(seed)
        sizes = ((512, 512), (512, 384), (256, 256))
        tensors = [torch.randint(-128, 127, (BLOCKS, padded), dtype=torch.int8) for padded, _ in sizes]
        refs = [CanonicalKVCacheRef(at, size) for at, (_, size) in enumerate(sizes)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors], [refs[:2], refs[2:]]
        )
        self.padded = tensors[1]
        groups = group_rows(caches, CHUNK)
        self.tensors = [tensor for rows in groups for tensor in rows.tensors]
        self.namespaces = [Namespace(f"t/m/{place}", size) for place, size in enumerate(page_sizes_of(groups))]
        client = PoolClient(node.socket, "worker")
        self.worker = EmsOffloadingWorker(client, DevicePair(tensors), 0, groups, self.namespaces, 5.0)
        self.jobs = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.client.close()

    def begin_store(self, blocks: GPULoadStoreSpec, pages: PagesToStore) -> int:
        self.jobs += 1
        self.worker.submit_store(self.jobs, blocks, pages)
        return self.jobs

    def ended(self, job: int) -> TransferResult:
        (result,) = first(lambda: [found] if (found := self.worker.get_finished()) else [], "the job ends")
        assert (result.job_id, result.success) == (job, True)
        return result

    def store(self, name: str, block_ids: list[int], index: int = 0) -> TransferResult:
        """Chunks of both groups in the same blocks."""
        count = -(-(index + len(block_ids)) // CHUNK) - index // CHUNK
        blocks = GPULoadStoreSpec(block_ids * 2, [len(block_ids)] * 2, [index] * 2)
        return self.ended(self.begin_store(blocks, PagesToStore([keys(name, count)] * 2, [parents(name, count)] * 2)))

    def lease(self, name: str, count: int) -> list[Lease]:
        leases = []
        for namespace in self.namespaces:
            hits = self.client.lookup(namespace, keys(name, count), lease=True)
            assert hits.count == count
            assert hits.lease is not None
            leases.append(hits.lease)
        return leases

    def load(self, name: str, leases: list[Lease], block_ids: list[int], index: int = 0) -> bool:
        """Whether the blocks have their chunks."""
        count = len(leases[0].packed_refs) // REF_BYTES
        blocks = GPULoadStoreSpec(block_ids * 2, [len(block_ids)] * 2, [index] * 2)
        pages = PagesToLoad(leases[0].node, [keys(name, count)] * 2, [[lease.packed_refs for lease in leases]])
        self.jobs += 1
        self.worker.submit_load(self.jobs, pages, blocks)
        self.ended(self.jobs)
        failed = self.worker.take_failed_loads()
        assert failed <= {self.jobs}
        return not failed

    def block(self, block_id: int) -> list[bytes]:
        return [tensor[block_id].numpy().tobytes() for tensor in self.tensors]


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
    assert one.store("a", ids).transfer_size == 2 * sum(namespace.page_size for namespace in one.namespaces)
    assert node.counters["pages_committed"] == 4
    padding = two.padded[:, 384:].clone()

    assert two.load("a", two.lease("a", 2), ids[::-1])

    for source, target in zip(ids, ids[::-1], strict=True):
        assert one.block(source) == two.block(target)
    assert torch.equal(two.padded[:, 384:], padding)
    assert node.counters["pages_corrupt"] == 0
    assert one.store("a", ids).transfer_size == 0, "it is there already"


@pytest.mark.parametrize(("index", "count"), [(1, 7), (3, 3), (4, 4), (0, 5)])
def test_a_load_may_begin_and_end_within_a_chunk(engines: tuple[Engine, Engine], index: int, count: int) -> None:
    one, two = engines
    ids = list(range(8))
    one.store("a", ids)
    leases = two.lease("a", 2)
    begin = index // CHUNK
    short = [Lease(lease.node, lease.epoch, lease.number, lease.packed_refs[begin * REF_BYTES :]) for lease in leases]
    count_of = 2 - begin
    blocks = GPULoadStoreSpec(list(range(20, 20 + count)) * 2, [count] * 2, [index] * 2)
    wanted = keys("a", 2)[begin * KEY_BYTES :]
    reach = -(-(index + count) // CHUNK) - begin
    pages = PagesToLoad(
        leases[0].node,
        [wanted[: reach * KEY_BYTES]] * 2,
        [[lease.packed_refs[: reach * REF_BYTES] for lease in short]],
    )
    assert reach <= count_of
    two.worker.submit_load(1, pages, blocks)
    two.ended(1)
    assert not two.worker.take_failed_loads()
    for number in range(count):
        assert two.block(20 + number) == one.block(ids[index + number])


def test_the_last_block_of_a_chunk_is_stored_alone_and_nothing_before_it_is_loaded(
    engines: tuple[Engine, Engine],
) -> None:
    """A layer that keeps a state needs the last one only."""
    one, two = engines
    one.store("state", [6], index=CHUNK - 1)
    leases = two.lease("state", 1)
    assert two.load("state", leases, [30], index=CHUNK - 1)
    assert two.block(30) == one.block(6)
    before = [two.block(block) for block in range(31, 35)]
    assert not two.load("state", leases, [31, 32, 33, 34])
    assert [two.block(block) for block in range(31, 35)] == before


def test_a_chunk_whose_end_is_missing_is_not_stored(engines: tuple[Engine, Engine], node: Node) -> None:
    one, _ = engines
    assert one.store("cut", [1, 2, 3, 4, 5]).transfer_size == sum(namespace.page_size for namespace in one.namespaces)
    assert node.counters["pages_committed"] == 2
    assert node.stats()["reservations"] == 0


def test_blocks_that_others_get_are_read_no_more(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    began, go_on = threading.Event(), threading.Event()

    def slow(page: memoryview) -> int:
        began.set()
        assert go_on.wait(10)
        return page_checksum(page)

    monkeypatch.setattr("ems.vllm.offloading.mover.page_checksum", slow)
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    blocks = GPULoadStoreSpec(list(range(8)), [8, 0], [0, 0])
    job = one.begin_store(blocks, PagesToStore([keys("b", 2), b""], [parents("b", 2), b""]))
    assert began.wait(10)
    one.worker.wait({job})  # returns although the job has not ended
    go_on.set()
    assert one.ended(job).transfer_size == one.namespaces[0].page_size
    assert node.stats()["reservations"] == 0


def test_a_store_that_takes_a_moment_is_waited_for(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    monkeypatch.setattr("ems.vllm.offloading.mover.FLUSH_SECONDS", 30.0)
    for number in range(5):
        name = f"flushed {number}"
        blocks = GPULoadStoreSpec(list(range(8)), [8, 0], [0, 0])
        job = one.begin_store(blocks, PagesToStore([keys(name, 2), b""], [parents(name, 2), b""]))
        one.worker.wait({job})
        one.ended(job)
    assert node.counters["pages_committed"] == 10


def test_a_node_that_hangs_is_left_alone(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    monkeypatch.setattr("ems.vllm.offloading.mover.AWAY_SECONDS", 600.0)
    one.worker._timeout = 0.2
    with node.frozen():
        one.store("a", list(range(8)))
        assert one.worker._away_until > 0
        # Nothing is asked now: this ends at once, although the node still hangs.
        one.worker._timeout = 60.0
        assert one.store("b", list(range(8))).transfer_size == 0


def test_a_load_from_a_node_that_is_gone_fails_whole(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    one.store("a", list(range(8)))
    leases = two.lease("a", 2)
    node.kill()
    node.start()
    assert not two.load("a", leases, [20, 21, 22, 23, 24, 25, 26, 27])
    assert one.store("c", list(range(4))).transfer_size is not None, "and the worker goes on"


def test_a_chunk_at_no_place_is_not_loaded(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    one.store("a", list(range(8)))
    good = two.lease("a", 2)
    bad = [
        Lease(lease.node, lease.epoch, lease.number, lease.packed_refs[:REF_BYTES] + bytes(REF_BYTES)) for lease in good
    ]
    assert not two.load("a", bad, list(range(20, 28)))
    assert two.load("a", good, list(range(20, 28)))


def test_bytes_that_changed_are_not_accepted(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    one.store("a", list(range(8)))
    leases = two.lease("a", 2)
    segment = one.client.segments(one.client.epoch) if one.client.connected else None
    assert segment is None
    reader = two.client.segments(two.client.epoch)
    ref = leases[0].refs[1]
    reader.segment(ref.segment)[ref.offset] ^= 1
    sound = two.load("a", leases, list(range(20, 28)))
    # A page is looked at when it is due; one that was is taken out of the pool.
    assert node.counters["pages_corrupt"] == (not sound)
