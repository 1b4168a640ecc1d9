"""What is read from another host's memory without a call of Mooncake's own, and when that is left to Mooncake."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from ems.pool.keys import NO_DIRECTORY, NO_PARENT, Tail
from ems.pool.layout import crc32c
from ems.pool.tiers.answers import Outcome, StoredTail
from ems.pool.tiers.cluster import calls
from ems.pool.tiers.cluster.direct_reads import DirectReads, Source, make_engine
from ems.pool.tiers.cluster.mooncake_config import MooncakeConfig
from ems.pool.tiers.cluster.mover import LIST_ATTEMPTS, MOST_READING, Lane, Mover
from ems.pool.tiers.cluster.objects import HEADER_BYTES, Objects
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.tiers import key
from tests.kit.waiting import until

PAGE = 4096
SPACE = "tenant/model/layout"
OBJECTS = Objects(SealKeys(b"a secret of sixteen", encrypts=False))
MISSING = -704
FEW = 256
HOST, OTHER = "192.0.2.1:1234", "192.0.2.2:1234"
NOBODY: Mapping[str, float] = MappingProxyType({})


class FakeCluster:
    """Store and transfer engine at once: objects in the memory of hosts, and what was asked of either."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.hosts: dict[str, list[str]] = {}
        """Of an object, where it is not ``HOST`` alone; Mooncake's own call reads from the first."""
        self.may_read: set[str] = set()
        """Hosts that Mooncake's own call has read from."""
        self.moved: set[str] = set()
        """Whose memory has something else by now when it is read directly."""
        self.on_disk = False
        self.fails: set[int] = set()
        """Transfers, counted from 1, that fail."""
        self.slow = 0
        """The same of those that bring more than a few bytes."""
        self.pending = 0
        """Questions after each transfer until it has ended."""
        self.hangs: set[str] = set()
        """Hosts whose transfers do not end."""
        self.refused: set[str] = set()
        """The same, and which refuse whoever asks for a few bytes: they have started anew."""
        self.transfers: list[int] = []
        """For each, how often its end is still not there."""
        self._arrives: list[tuple[int, bytes]] = []
        """What each brings when it ends, and where to."""
        self.most_under_way = 0
        self.own_calls: list[list[str]] = []
        self.removed: list[str] = []
        self.writes: list[str] = []
        self.refuses = 0
        """Writes that Mooncake refuses because another host writes the same."""

    # The store

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def unregister_buffer(self, _address: int) -> int:
        return 0

    def _address(self, name: str) -> int:
        return (1 + sorted(self.objects).index(name)) << 20

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        def replica(name: str, host: str) -> Any:
            buffer = SimpleNamespace(
                transport_endpoint=host, buffer_address=self._address(name), size=len(self.objects[name])
            )
            return SimpleNamespace(
                status=SimpleNamespace(name="PROCESSING" if host.startswith("writing") else "COMPLETE"),
                is_memory_replica=lambda: not self.on_disk,
                get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=buffer),
            )

        return {
            name: [replica(name, host) for host in self.hosts.get(name, [HOST])]
            for name in names
            if name in self.objects
        }

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self.own_calls.append(names)
        return [self._get(*one) for one in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        content = self.objects.get(name)
        if content is None or len(content) != sum(sizes):
            return MISSING if content is None else -600
        self.may_read.add(self.hosts.get(name, [HOST])[0])
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, content[:size], size)
            content = content[size:]
        return sum(sizes)

    def upsert(self, name: str, raw: bytes, _config: object) -> int:
        self.writes.append(name)
        if self.refuses:
            self.refuses -= 1
            return -601
        self.objects[name] = raw
        return 0

    def upsert_batch(self, names: list[str], raws: list[bytes], config: object) -> int:
        return max(self.upsert(name, raw, config) for name, raw in zip(names, raws, strict=True))

    def get_batch(self, names: list[str]) -> list[bytes]:
        self.own_calls.append(names)
        self.may_read.update(self.hosts.get(name, [HOST])[0] for name in names if name in self.objects)
        return [self.objects.get(name, b"") for name in names]

    def get_size(self, name: str) -> int:
        return len(self.objects[name]) if name in self.objects else MISSING

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.objects) for name in names]

    def remove(self, name: str, *, force: bool) -> int:
        assert force
        self.removed.append(name)
        return 0

    # The engine

    def batch_transfer_async_read(self, host: str, to: list[int], addresses: list[int], sizes: list[int]) -> int:
        assert host in self.may_read, "the first contact is Mooncake's"
        ((target,), (address,), (size,)) = to, addresses, sizes
        name = sorted(self.objects)[(address >> 20) - 1]
        start = address & 0xFFFFF
        content = self.objects[name][start : start + size]
        ctypes.memset(target, 0xA5, size)
        self._arrives.append((target, bytes(size) if name in self.moved else content))
        if host in self.refused and size <= 64:
            self.fails.add(len(self.transfers) + 1)
        hangs = host in self.hangs or (host in self.refused and size > 64)
        self.transfers.append(1 << 30 if hangs else self.slow if size > FEW else self.pending)
        self.most_under_way = max(self.most_under_way, sum(left >= 0 for left in self.transfers))
        return len(self.transfers)

    def transfer_check_status(self, transfer: int) -> int:
        if self.transfers[transfer - 1] > 0:
            self.transfers[transfer - 1] -= 1
            return 0
        assert self.transfers[transfer - 1] == 0, "it was said to have ended, and its number is another's by now"
        self.transfers[transfer - 1] = -1
        if transfer in self.fails:
            return -1
        target, content = self._arrives[transfer - 1]
        ctypes.memmove(target, content, len(content))
        return 1


class Host:
    """One that fetches from ``cluster`` into a segment of its own."""

    def __init__(
        self, cluster: FakeCluster, silent: Mapping[str, float] = NOBODY, *, mapped: bool = True, pages: int = 16
    ) -> None:
        self.reads = DirectReads(cluster, cluster, silent)
        self.lane = Lane(Mover(cluster, self.reads, OBJECTS, None, None))
        self.file = os.memfd_create("ems-direct")
        os.truncate(self.file, pages * PAGE)
        self.lane.answer(calls.Attach(1, pages * PAGE, mapped=mapped), [os.dup(self.file)])

    def fetch(self, *names: str) -> calls.Answer:
        places = [calls.Place(key(name), 1, at * PAGE) for at, name in enumerate(names)]
        return self.lane.answer(calls.Fetch(SPACE, PAGE, places), [])

    def tails(self, name: str) -> list[Tail]:
        answer = self.lane.answer(calls.FindTails(SPACE, [key(name)]), [])
        return [one.tail for one in answer.tails]

    def bytes_at(self, position: int) -> bytes:
        return os.pread(self.file, PAGE, position * PAGE)


def seal_name(name: str) -> str:
    seal = OBJECTS.of(SPACE)
    assert seal is not None
    return seal.name(key(name))


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


def test_a_host_that_mooncake_may_not_have_reached_is_left_to_it(cluster: FakeCluster) -> None:
    """Of an object in two places it does not say which it has read."""
    host = Host(cluster)
    first, second = put(cluster, "a")[0], put(cluster, "b")[0]
    cluster.hosts = {first: [OTHER, HOST], second: [HOST]}
    assert [host.fetch("a").codes, host.fetch("b").codes, host.fetch("b").direct] == [[Outcome.DONE], [Outcome.DONE], 1]
    assert cluster.own_calls == [[first], [second]]


def test_a_copy_that_is_being_written_is_not_read(cluster: FakeCluster) -> None:
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    name, _ = put(cluster, "b")
    cluster.hosts[name] = ["writing:1", HOST]
    assert host.fetch("b").direct == 1


def test_no_more_is_under_way_than_mooncake_takes(cluster: FakeCluster) -> None:
    names = [f"page {number}" for number in range(4 * MOST_READING)]
    host = Host(cluster, pages=len(names))
    for name in names:
        put(cluster, name)
    host.fetch(names[0])
    answer = host.fetch(*names)
    assert (set(answer.codes), answer.direct) == ({Outcome.DONE}, len(names))
    assert cluster.most_under_way == 2 * MOST_READING


def test_nothing_is_copied_through_memory_that_bytes_may_still_arrive_in(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ems.pool.tiers.cluster.mover.STAGING", 2 * PAGE)
    host = Host(cluster, mapped=False)
    put(cluster, "a")
    host.fetch("a")
    for name in "bcde":
        put(cluster, name)
    cluster.fails.add(2)
    answer = host.fetch(*"bcde")
    assert (answer.codes, answer.unsafe) == ([Outcome.MISSING, Outcome.DONE, Outcome.MISSING, Outcome.MISSING], True)
    assert len(answer.sums) == len(answer.codes)
    assert len(cluster.transfers) == 4


def test_without_an_engine_of_our_own_nothing_is_asked(cluster: FakeCluster) -> None:
    name, _ = put(cluster, "a")
    reads = DirectReads(cluster, None, {})
    reads.reached([name])
    assert reads.find([name]) == {}


def test_a_transfer_that_could_not_be_begun_is_none_that_ended_well(cluster: FakeCluster) -> None:
    """And the one beside it has ended before somebody is told."""
    name, _ = put(cluster, "a")
    begun, asked = iter([7, 0]), list[int]()

    def check(number: int) -> int:
        asked.append(number)
        return 1

    engine = SimpleNamespace(batch_transfer_async_read=lambda *_: next(begun), transfer_check_status=check)
    reads = DirectReads(cluster, engine, {})
    reads.reached([name])
    source = reads.find([name])[name]
    assert not reads.ended(source, reads.begin(source, [0, 0], [HEADER_BYTES, PAGE]))
    assert asked == [7]


def test_what_mooncake_calls_neither_good_nor_bad_may_still_arrive(cluster: FakeCluster) -> None:
    reads = DirectReads(cluster, SimpleNamespace(transfer_check_status=lambda _number: -2), {})
    assert not reads.ended(Source(HOST, 0, 2, only=True), [1, 2])


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


def list_tails(cluster: FakeCluster, name: str, tokens: int = 1, count: int = 1) -> tuple[str, list[Tail]]:
    """Have the directory ``name`` list so many tails of so many tokens."""
    seal, tails = OBJECTS.of(SPACE), [Tail(key(name), os.urandom(4 * tokens)) for _ in range(count)]
    assert seal is not None
    object_name = seal.listing_name(key(name))
    cluster.objects[object_name] = seal.listing(key(name), [StoredTail(tail, bytes(NO_PARENT)) for tail in tails])
    return object_name, tails


def test_a_list_of_tails_is_read_directly_once_mooncake_has_reached_its_host(cluster: FakeCluster) -> None:
    cluster.pending = 2
    host = Host(cluster)
    (first, tails), (_, others) = list_tails(cluster, "a"), list_tails(cluster, "b", count=2)
    assert host.tails("none") == []
    assert not cluster.own_calls, "the master knows that there is nothing"
    assert host.tails("a") == tails
    assert first in cluster.own_calls[-1]
    before = len(cluster.own_calls)
    assert host.tails("b") == others
    assert host.tails("none") == []
    assert len(cluster.own_calls) == before


@pytest.mark.parametrize("why", ["it fails", "it is long", "its host is new", "it is on disk"])
def test_a_list_that_is_not_to_be_read_directly_is_left_to_mooncake(
    cluster: FakeCluster, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(cluster)
    list_tails(cluster, "a")
    host.tails("a")
    name, tails = list_tails(cluster, "b", count=3)
    if why == "it is long":
        monkeypatch.setattr("ems.pool.tiers.cluster.mover.LISTED_BYTES", 1 << 10)
        host = Host(cluster)
    if why == "it fails":
        cluster.fails = {1}
    if why == "its host is new":
        cluster.hosts[name] = [OTHER]
    cluster.on_disk = why == "it is on disk"
    assert host.tails("b") == tails
    assert cluster.own_calls[-1] == [name]


def test_who_asks_for_keys_hears_which_directories_list_nothing(cluster: FakeCluster) -> None:
    host = Host(cluster)
    put(cluster, "k")
    list_tails(cluster, "b")
    asked = calls.Exist(SPACE, [key("k"), key("l")], [key("a"), key("b"), NO_DIRECTORY])
    assert host.lane.answer(asked, []).codes == [1, 0, 0, 1, 0]
    assert not cluster.own_calls
    assert not cluster.transfers


def test_after_a_read_that_failed_the_others_are_left_to_mooncake(cluster: FakeCluster) -> None:
    host = Host(cluster)
    names = [list_tails(cluster, f"{number}")[0] for number in range(5)]
    host.tails("0")
    cluster.fails = {2}
    directories = [key(f"{number}") for number in range(5)]
    found = host.lane.answer(calls.FindTails(SPACE, directories), []).tails
    assert [bytes(one.tail.directory) for one in found] == directories
    assert cluster.own_calls[-1] == names[1:]
    assert len(cluster.transfers) == 2, "a host that is gone is not waited for again"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("direct_reads", "silent_hosts"):
        monkeypatch.setattr(f"ems.pool.tiers.cluster.{module}.ANSWER_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_host_that_hangs_costs_its_lists_and_no_others(cluster: FakeCluster) -> None:
    host = Host(cluster)
    for name in ("a", "b", "c", "d"):
        cluster.hosts[list_tails(cluster, name)[0]] = [OTHER if name in "bd" else HOST]
    assert host.tails("a")
    assert host.tails("b")
    own_calls = len(cluster.own_calls)
    cluster.hangs = {OTHER}

    found = host.lane.answer(calls.FindTails(SPACE, [key(name) for name in ("b", "d", "a", "c")]), []).tails

    assert [bytes(one.tail.directory) for one in found] == [key("a"), key("c")]
    assert len(cluster.own_calls) == own_calls, "Mooncake's own call would hang as well"
    assert len(cluster.transfers) == 4, "once it did not answer, and not with a few bytes, it is left alone"


@pytest.mark.usefixtures("impatient")
def test_a_host_that_hangs_costs_its_pages_and_no_others(cluster: FakeCluster) -> None:
    host = Host(cluster)
    for name in ("a", "b", "c", "d"):
        cluster.hosts[put(cluster, name)[0]] = [OTHER if name in "bd" else HOST]
    host.fetch("a")
    host.fetch("b")
    cluster.hangs = {OTHER}

    answer = host.fetch("a", "b", "c", "d")
    assert answer.codes == [Outcome.DONE, Outcome.MISSING, Outcome.DONE, Outcome.MISSING]
    assert (answer.unsafe, list(answer.silent), len(cluster.own_calls)) == (True, [OTHER], 2)

    successor = Host(cluster, answer.silent)
    answer = successor.fetch("b", "c", "d")
    assert answer.codes == [Outcome.MISSING, Outcome.DONE, Outcome.MISSING]
    assert (answer.unsafe, answer.silent) == (False, {})
    assert cluster.own_calls[2:] == [[seal_name("c")]], "of what may lie there nobody is asked"


@pytest.mark.parametrize("refuses", [False, True], ids=["hangs", "refuses"])
def test_a_host_that_lost_its_connections_counts_as_silent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Of one that was switched off and on again what was begun never ends, and what is asked now is refused."""
    for module in ("direct_reads", "silent_hosts"):
        monkeypatch.setattr(f"ems.pool.tiers.cluster.{module}.ANSWER_SECONDS", 0.01)
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    put(cluster, "b")
    (cluster.refused if refuses else cluster.hangs).add(HOST)
    answer = host.fetch("b")
    assert (answer.codes, answer.unsafe, list(answer.silent)) == ([Outcome.MISSING], True, [HOST])


def test_transfers_that_fail_are_no_sign_of_life(cluster: FakeCluster) -> None:
    host = Host(cluster)
    for name in ("a", "b"):
        put(cluster, name)
    host.fetch("a")
    heard = dict(host.reads._hosts._heard)
    cluster.fails = set(range(1, 100))
    host.fetch("b")
    assert len(cluster.transfers) > 0
    assert host.reads._hosts._heard == heard


def test_a_host_behind_a_slow_link_does_not_count_as_silent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("direct_reads", "silent_hosts"):
        monkeypatch.setattr(f"ems.pool.tiers.cluster.{module}.ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("ems.pool.tiers.cluster.silent_hosts.LEAST_RATE", 1 << 40)
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    put(cluster, "b")
    cluster.slow = 120
    answer = host.fetch("b")
    assert (answer.codes, answer.unsafe) == ([Outcome.DONE], False)
    assert len(cluster.transfers) > 2, "it was asked for a few bytes meanwhile"


@pytest.mark.usefixtures("impatient", "quick")
def test_what_is_listed_on_a_silent_host_is_not_written_anew(cluster: FakeCluster) -> None:
    host = Host(cluster)
    name, tails = list_tails(cluster, "a", count=2)
    assert host.tails("a") == tails
    cluster.hangs = {HOST}
    add_tail(host, "a")
    assert cluster.writes == []
    seal = OBJECTS.of(SPACE)
    assert seal is not None
    assert [one.tail for one in seal.listed(key("a"), cluster.objects[name])] == tails


@pytest.mark.usefixtures("quick")
def test_a_tail_that_another_host_took_out_of_its_list_is_listed_again(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(cluster)
    name, tails = list_tails(cluster, "a")
    seal, write = OBJECTS.of(SPACE), cluster.upsert
    assert seal is not None
    others = [*tails, Tail(key("a"), b"othr")]

    def overwritten(written: str, raw: bytes, config: object) -> int:
        """Another host, which read the list before this one wrote it, writes it behind this one."""
        write(written, raw, config)
        if len(cluster.writes) == 1:
            cluster.objects[name] = seal.listing(key("a"), [StoredTail(one, bytes(NO_PARENT)) for one in others])
        return 0

    monkeypatch.setattr(cluster, "upsert", overwritten)
    mine = add_tail(host, "a")
    assert host.tails("a") == [*others, mine]


@pytest.mark.parametrize("fetches", [True, False], ids=["pages", "lists"])
@pytest.mark.usefixtures("impatient")
def test_a_host_that_hangs_when_mooncake_first_reaches_it_is_left_alone(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, *, fetches: bool
) -> None:
    monkeypatch.setattr("ems.pool.tiers.cluster.mover.OWN_SECONDS", 0.01)
    monkeypatch.setattr("ems.pool.tiers.cluster.mover.OWN_LIST_SECONDS", 0.01)
    over = threading.Event()
    host = Host(cluster)
    put(cluster, "a")
    host.fetch("a")
    cluster.hosts[put(cluster, "b")[0]] = [OTHER]
    cluster.hosts[list_tails(cluster, "b")[0]] = [OTHER]
    for call in ("get_batch", "batch_get_into_multi_buffers"):
        monkeypatch.setattr(cluster, call, lambda *_: over.wait(60) and [])

    answer = host.fetch("b") if fetches else host.lane.answer(calls.FindTails(SPACE, [key("b")]), [])

    assert (answer.unsafe, list(answer.silent)) == (True, [OTHER])
    assert answer.codes == ([Outcome.MISSING] if fetches else [])
    over.set()


@pytest.mark.usefixtures("impatient")
def test_a_host_that_hung_is_asked_again_after_a_while(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.pool.tiers.cluster.silent_hosts.SILENT_SECONDS", 0.01)
    host = Host(cluster)
    _, tails = list_tails(cluster, "a")
    assert host.tails("a") == tails
    cluster.hangs = {HOST}
    assert host.tails("a") == []
    cluster.hangs = set()
    until(lambda: host.tails("a") == tails, "it answers again", 10)


@pytest.mark.usefixtures("impatient")
def test_of_two_places_that_which_answers_is_read(cluster: FakeCluster) -> None:
    cluster.may_read = {OTHER}
    name, _ = put(cluster, "a")
    other, _ = put(cluster, "b")
    cluster.hosts = {name: [HOST, OTHER], other: [OTHER]}
    host = Host(cluster, {HOST: math.inf})
    host.fetch("b")
    answer = host.fetch("a")
    assert (answer.codes, answer.direct) == ([Outcome.DONE], 1)


def add_tail(host: Host, name: str) -> Tail:
    tail = Tail(key(name), os.urandom(8))
    host.lane.answer(calls.ListTails(SPACE, [calls.Listed(tail, bytes(NO_PARENT))]), [])
    return tail


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.pool.tiers.cluster.mover.LIST_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_list_that_another_host_is_writing_is_not_taken_for_none(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(cluster)
    name, tails = list_tails(cluster, "a", count=2)
    writing = iter([[b""]])
    read = cluster.get_batch
    monkeypatch.setattr(cluster, "get_batch", lambda names: next(writing, None) or read(names))
    mine = add_tail(host, "a")
    assert host.tails("a") == [*tails, mine]
    assert cluster.writes == [name]


@pytest.mark.usefixtures("quick")
def test_a_list_that_two_hosts_write_at_once_is_written_again(cluster: FakeCluster) -> None:
    host = Host(cluster)
    cluster.refuses = 1
    mine = add_tail(host, "a")
    assert host.tails("a") == [mine]
    assert len(cluster.writes) == 2
    cluster.refuses = 100
    add_tail(host, "b")
    assert len(cluster.writes) <= 2 + LIST_ATTEMPTS, "not for ever"
