"""What is read from another host's memory without a call of Mooncake's own, and when that is left to Mooncake."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ems.pool.keys import NO_PARENT
from ems.pool.layout import crc32c
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.agent import Lane, Mover
from ems.pool.tiers.cluster.direct_reads import DirectReads, Source, make_engine
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig
from ems.pool.tiers.cluster.objects import HEADER_BYTES, Objects
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.tiers import key

PAGE = 4096
SPACE = "tenant/model/layout"
OBJECTS = Objects(SealKeys(b"a secret of sixteen", encrypts=False))
MISSING = -704
HOST = "192.0.2.1:1234"


class FakeCluster:
    """Store and transfer engine at once: objects in the memory of ``HOST``, and what was asked of either."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.moved: set[str] = set()
        """Whose memory has something else by now when it is read directly."""
        self.on_disk = False
        self.fails: set[int] = set()
        """Transfers, counted from 1, that fail."""
        self.pending = 0
        """Questions after each transfer until it has ended."""
        self.transfers: list[int] = []
        """For each, how often its end is still not there."""
        self.own_calls: list[list[str]] = []
        self.removed: list[str] = []

    # The store

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0

    def _address(self, name: str) -> int:
        return (1 + sorted(self.objects).index(name)) << 20

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        def replica(name: str) -> Any:
            buffer = SimpleNamespace(
                transport_endpoint=HOST, buffer_address=self._address(name), size=len(self.objects[name])
            )
            return SimpleNamespace(
                status=SimpleNamespace(name="COMPLETE"),
                is_memory_replica=lambda: not self.on_disk,
                get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=buffer),
            )

        return {name: [replica(name)] for name in names if name in self.objects}

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.own_calls.append(names)
        return [self._get(*one) for one in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        content = self.objects.get(name)
        if content is None or len(content) != sum(sizes):
            return MISSING if content is None else -600
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, content[:size], size)
            content = content[size:]
        return sum(sizes)

    def remove(self, name: str, *, force: bool) -> int:
        assert force
        self.removed.append(name)
        return 0

    # The engine

    def batch_transfer_async_read(self, host: str, to: list[int], addresses: list[int], sizes: list[int]) -> int:
        assert host == HOST
        ((target,), (address,), (size,)) = to, addresses, sizes
        name = sorted(self.objects)[(address >> 20) - 1]
        start = address & 0xFFFFF
        content = self.objects[name][start : start + size]
        ctypes.memmove(target, bytes(size) if name in self.moved else content, size)
        self.transfers.append(self.pending)
        return len(self.transfers)

    def transfer_check_status(self, transfer: int) -> int:
        if self.transfers[transfer - 1] > 0:
            self.transfers[transfer - 1] -= 1
            return 0
        assert self.transfers[transfer - 1] == 0, "it was said to have ended, and its number is another's by now"
        self.transfers[transfer - 1] = -1
        return -1 if transfer in self.fails else 1


class Host:
    """One that fetches from ``cluster`` into a segment of its own."""

    def __init__(self, cluster: FakeCluster, *, mapped: bool = True) -> None:
        mover = Mover(cluster, cluster, OBJECTS, None, None)
        self.lane = Lane(mover)
        self.file = os.memfd_create("ems-direct")
        os.truncate(self.file, 16 * PAGE)
        self.lane.answer(calls.Attach(1, 16 * PAGE, mapped=mapped), [os.dup(self.file)])

    def fetch(self, *names: str) -> calls.Answer:
        places = [calls.Place(key(name), 1, at * PAGE) for at, name in enumerate(names)]
        return self.lane.answer(calls.Fetch(SPACE, PAGE, places), [])

    def bytes_at(self, position: int) -> bytes:
        return os.pread(self.file, PAGE, position * PAGE)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def put(cluster: FakeCluster, name: str, size: int = PAGE) -> tuple[str, bytes]:
    """Name and bytes of a page that another host stored."""
    seal = OBJECTS.of(SPACE)
    assert seal is not None
    payload = os.urandom(size)
    object_name = seal.name(key(name))
    cluster.objects[object_name] = seal.header(key(name), bytes(NO_PARENT), payload, crc32c(payload)) + payload
    return object_name, payload


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "copied"])
def test_a_host_is_read_directly_once_mooncake_has_reached_it(cluster: FakeCluster, *, mapped: bool) -> None:
    cluster.pending = 2
    pages = {name: put(cluster, name) for name in ("a", "b", "c")}
    host = Host(cluster, mapped=mapped)

    first = host.fetch("a")
    assert (first.codes, first.direct, cluster.own_calls) == ([Outcome.DONE], 0, [[pages["a"][0]]])

    answer = host.fetch("b", "c")
    assert (answer.codes, answer.direct, len(cluster.own_calls)) == ([Outcome.DONE] * 2, 2, 1)
    assert [host.bytes_at(at) for at in (0, 1)] == [pages["b"][1], pages["c"][1]]
    assert answer.sums == [crc32c(pages[name][1]) for name in ("b", "c")]


def test_what_was_moved_meanwhile_is_fetched_by_mooncake_and_kept(cluster: FakeCluster) -> None:
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    (moved, payload), _ = put(cluster, "b"), put(cluster, "c")
    cluster.moved.add(moved)

    answer = host.fetch("b", "c")

    assert (answer.codes, answer.direct) == ([Outcome.DONE] * 2, 1)
    assert cluster.own_calls[1:] == [[moved]]
    assert host.bytes_at(0) == payload
    assert not cluster.removed


def test_what_nobody_sealed_is_removed(cluster: FakeCluster) -> None:
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    name, _ = put(cluster, "b")
    cluster.objects[name] = cluster.objects[name][:-1] + b"?"

    assert host.fetch("b").codes == [Outcome.CORRUPT]
    assert cluster.removed == [name]


def test_after_a_transfer_that_failed_bytes_may_still_arrive(cluster: FakeCluster) -> None:
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    for name in ("b", "c", "d"):
        put(cluster, name)
    cluster.pending = 3
    cluster.fails.add(4)

    answer = host.fetch("b", "c", "missing", "d")

    assert (answer.codes, answer.unsafe) == ([Outcome.DONE, Outcome.MISSING, Outcome.MISSING, Outcome.DONE], True)
    assert cluster.transfers == [-1] * 6, "all have ended before somebody is told"
    assert len(cluster.own_calls) == 1


@pytest.mark.parametrize("change", ["missing", "longer", "on disk"])
def test_mooncake_fetches_what_is_not_in_memory_as_it_should_be(cluster: FakeCluster, change: str) -> None:
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    name, _ = put(cluster, "b", PAGE + (change == "longer"))
    if change == "missing":
        del cluster.objects[name]
    cluster.on_disk = change == "on disk"

    answer = host.fetch("b")

    expected = {"missing": Outcome.MISSING, "longer": Outcome.WRONG_SIZE, "on disk": Outcome.DONE}[change]
    assert (answer.codes, answer.direct, answer.unsafe) == ([expected], 0, False)
    assert cluster.own_calls[1:] == [[name]]


def test_without_an_engine_of_our_own_nothing_is_asked(cluster: FakeCluster) -> None:
    name, _ = put(cluster, "a")
    assert DirectReads(cluster, None).find([name]) == {}


def test_a_transfer_that_could_not_be_begun_is_none_that_ended_well(cluster: FakeCluster) -> None:
    reads = DirectReads(cluster, SimpleNamespace(batch_transfer_async_read=lambda *_: 0))
    source = Source(HOST, 1 << 20, HEADER_BYTES + PAGE)
    reads.reached([source])
    assert not reads.ended(reads.begin(source, [0, 0], [HEADER_BYTES, PAGE]))


@pytest.mark.parametrize(
    "config",
    [
        MooncakeConfig(master_server_address="192.0.2.1:50051", protocol="rdma"),
        MooncakeConfig(master_server_address="192.0.2.1:50051", metadata_server="http://192.0.2.1:8080/metadata"),
    ],
    ids=["hardware", "central-metadata"],
)
def test_mooncake_makes_its_own_engine_for_all_but_plain_hosts(config: MooncakeConfig) -> None:
    assert make_engine(config, "192.0.2.1") is None
