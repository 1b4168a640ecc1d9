"""Loads and saves between engine blocks and a real node's pages, with faults in every place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from ems.pool.client.answers import Reservation
from ems.pool.keys import NO_PARENT
from ems.pool.layout import Header, PageRef, SlotState
from ems.pool.segments.reader import Verify
from ems.transfers.checksums import PageSums
from ems.transfers.device import CpuDevice
from ems.transfers.plan import CopyPlan
from ems.vllm.requests import Save
from tests.e2e.engines import Node, first, running_node, wait_for
from tests.kit.headers import write_header
from tests.vllm.engine_memory import BLOCKS, Engine, chain_of, equal, present


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node("--size", "8MB") as running:
        wait_for(lambda: running.stats()["bytes_touched"] == 8 << 20, "the memory is touched")
        yield running


@pytest.fixture
def engines(node: Node) -> Iterator[tuple[Engine, Engine]]:
    pair = Engine(node, "one"), Engine(node, "two")
    yield pair
    for engine in pair:
        engine.close()


def segment_files(node: Node) -> set[int]:
    return {file.stat().st_ino for file in node.directory.glob("segment-*")}


def test_blocks_come_back_byte_for_byte_in_another_engine(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    chain = chain_of(4)
    one.save(chain, [3, 1, 7, 2])
    wait_for(lambda: present(two, chain) == 4, "the pages are committed")

    result = two.load(chain, two.lease(chain), [9, 8, 0, 15])

    assert (result.loaded, result.failed_blocks) == (4, set())
    for source, target in zip([3, 1, 7, 2], [9, 8, 0, 15], strict=True):
        assert equal(one.block(source), two.block(target))


def test_the_checksum_of_a_page_is_taken_with_its_copy(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed afterwards it reads all bytes again."""
    one, two = engines
    again: list[memoryview] = []
    monkeypatch.setattr("ems.transfers.checksums.crc32c", again.append)
    monkeypatch.setattr("ems.vllm.saves.crc32c", again.append)
    chain = chain_of(3)
    one.save(chain, [0, 1, 2])
    wait_for(lambda: present(two, chain) == 3, "the pages are committed")
    assert again == []

    hits = two.client.lookup(two.namespace, chain.packed(0, 3), lease=True)
    assert hits.lease is not None
    reader = two.client.reader(two.namespace, hits.lease.epoch, Verify.ALWAYS)
    pages = reader.look(hits.lease.packed_refs, chain.packed(0, 3))
    assert pages.present == reader.sound(pages, 0, 3) == len(pages.checksums) == 3


def test_a_save_is_seen_as_being_written_before_the_step_has_computed(engines: tuple[Engine, Engine]) -> None:
    """A decode that arrives early can tell that waiting pays."""
    one, two = engines
    chain = chain_of(2)
    batch = one.saver.start([Save(1, "save", 0, NO_PARENT, chain.tails(0, 2), [[0, 1]])])

    def seen() -> tuple[int, int]:
        found = two.client.lookup(two.namespace, chain.packed(0, 2))
        return found.count, found.pending

    wait_for(lambda: seen() == (0, 2), "the pages are reserved")
    assert one.saver.take_over() == []
    batch.progress.finish(None)
    wait_for(lambda: seen() == (2, 0), "the pages are committed")
    assert one.saver.take_over() == [1]


def test_a_cancelled_save_copies_nothing_and_leaves_nothing(engines: tuple[Engine, Engine], node: Node) -> None:
    """The engine takes the blocks away before the step: what follows in them must not be stored under the old name."""
    one, two = engines
    chain = chain_of(3)
    batch = one.saver.start([Save(1, "save", 0, NO_PARENT, chain.tails(0, 3), [[0, 1, 2]])])
    wait_for(lambda: node.stats()["reservations"] == 1, "the pages are reserved")
    one.saver.finish(0.0)
    for tensor in one.tensors:
        tensor.zero_()
    batch.progress.finish(None)

    first(one.saver.take_over, "the save ends")
    wait_for(lambda: node.stats()["reservations"] == 0, "the reservation is given back")
    assert present(two, chain) == 0


def test_cancelling_waits_for_the_copy_that_runs(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    began, go_on = threading.Event(), threading.Event()
    copy = CpuDevice.copy

    def slow(device: CpuDevice, plan: CopyPlan, sums: PageSums) -> None:
        began.set()
        assert go_on.wait(10)
        copy(device, plan, sums)

    monkeypatch.setattr(CpuDevice, "copy", slow)
    chain = chain_of(2)
    one.saver.start([Save(1, "save", 0, NO_PARENT, chain.tails(0, 2), [[0, 1]])]).progress.finish(None)
    assert began.wait(10)
    cancelling = threading.Thread(target=one.saver.finish, args=(0.0,))
    cancelling.start()
    cancelling.join(0.1)
    assert cancelling.is_alive()

    go_on.set()
    cancelling.join(10)
    assert not cancelling.is_alive()
    first(one.saver.take_over, "the save ends")


def test_what_was_read_before_a_save_was_called_off_is_not_stored(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have been clearing the blocks already."""
    one, two = engines
    copy, began, go_on = CpuDevice.copy, threading.Event(), threading.Event()

    def slow(device: CpuDevice, plan: CopyPlan, sums: PageSums) -> None:
        copy(device, plan, sums)
        began.set()
        assert go_on.wait(10)

    monkeypatch.setattr(CpuDevice, "copy", slow)
    chain = chain_of(2)
    one.saver.start([Save(1, "save", 0, NO_PARENT, chain.tails(0, 2), [[0, 1]])]).progress.finish(None)
    assert began.wait(10)
    calling = threading.Thread(target=one.saver.call_off)
    calling.start()
    wait_for(lambda: next(iter(one.saver._open.values()))[0].mixed, "it is called off")
    go_on.set()
    calling.join(10)
    first(one.saver.take_over, "the save ends")
    wait_for(lambda: node.stats()["reservations"] == 0, "the slots went back")
    assert present(two, chain) == 0


def rewrite_header(engine: Engine, ref: PageRef, state: SlotState, generation: int, key: bytes) -> None:
    segment = engine.client.segments(engine.client.epoch).segment(ref.segment)
    write_header(segment, ref.slot, Header(state, generation, key, length=engine.namespace.page_size))


@pytest.mark.parametrize("change", ["state", "generation", "key"])
def test_a_page_that_is_not_what_was_promised_is_not_loaded(engines: tuple[Engine, Engine], change: str) -> None:
    one, two = engines
    chain = chain_of(4)
    one.save(chain, [0, 1, 2, 3])
    wait_for(lambda: present(two, chain) == 4, "the pages are committed")
    lease = two.lease(chain)
    ref, key = lease.refs[2], chain[2:3][0]
    state = SlotState.WRITING if change == "state" else SlotState.PRESENT
    generation = ref.generation + (change == "generation")
    rewrite_header(two, ref, state, generation, bytes(16) if change == "key" else key)

    result = two.load(chain, lease, [4, 5, 6, 7])

    assert result.loaded == 2
    assert result.failed_blocks == {6, 7}


def test_a_page_that_changes_during_the_copy_is_not_loaded(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engines
    chain = chain_of(3)
    one.save(chain, [0, 1, 2])
    wait_for(lambda: present(two, chain) == 3, "the pages are committed")
    lease = two.lease(chain)
    copy = CpuDevice.copy

    def reused(device: CpuDevice, plan: CopyPlan) -> None:
        copy(device, plan)
        if plan.engine[0] == two.tensors[0][5].data_ptr():
            rewrite_header(two, lease.refs[1], SlotState.WRITING, lease.refs[1].generation + 1, bytes(16))

    monkeypatch.setattr(CpuDevice, "copy", reused)
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    result = two.load(chain, lease, [4, 5, 6])

    assert result.loaded == 1
    assert result.failed_blocks == {5, 6}


def test_a_dead_node_fails_loads_and_saves_without_hanging(engines: tuple[Engine, Engine], node: Node) -> None:
    one, two = engines
    chain = chain_of(2)
    one.save(chain, [0, 1])
    wait_for(lambda: present(two, chain) == 2, "the pages are committed")
    lease = two.lease(chain)
    node.kill()

    one.save(chain_of(2, seed=1), [2, 3])
    # The memory outlives the node: a load that was promised may still succeed, and must end either way.
    result = two.load(chain, lease, [4, 5])
    assert result.failed_blocks in (set(), {4, 5})


def test_an_idle_engine_says_at_once_where_it_stopped_to_write(engines: tuple[Engine, Engine], node: Node) -> None:
    """Its node was killed within a save; nobody gets those slots until it says that no copy runs any more."""
    one, _ = engines
    batch = one.saver.start([Save(1, "save", 0, NO_PARENT, chain_of(2).tails(0, 2), [[0, 1]])])
    wait_for(lambda: node.stats()["reservations"] == 1, "the pages are reserved")
    node.kill()
    node.start()
    assert node.stats()["slots_resting"] == 2
    memory = segment_files(node)
    batch.progress.finish(None)
    wait_for(lambda: node.stats()["slots_resting"] == 0, "the slots are free")
    assert segment_files(node) == memory, "the node gave up waiting and replaced the memory"


def test_references_of_a_node_mean_nothing_to_its_successor(engines: tuple[Engine, Engine], node: Node) -> None:
    """A fresh node gives the same key the same slot and generation, perhaps at another place."""
    one, two = engines
    chain = chain_of(2)
    one.save(chain, [0, 1])
    wait_for(lambda: present(two, chain) == 2, "the pages are committed")
    lease = two.lease(chain)
    node.kill()
    node.start()
    wait_for(lambda: node.stats()["bytes_touched"] == 8 << 20, "the memory is touched")

    def stored() -> bool:
        one.save(chain, [0, 1])
        try:
            return present(two, chain) == 2
        except (ConnectionError, TimeoutError):
            return False

    wait_for(stored, "the new node has the pages")
    result = two.load(chain, lease, [4, 5])

    assert (result.loaded, result.failed_blocks) == (0, {4, 5})


def test_a_defect_in_a_copy_ends_the_job_and_not_the_thread(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engines
    copy: Callable[..., None] = CpuDevice.copy

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(CpuDevice, "copy", broken)
    one.save(chain_of(2), [0, 1])
    monkeypatch.setattr(CpuDevice, "copy", copy)
    assert present(two, chain_of(2)) == 0
    chain = chain_of(2, seed=2)
    one.save(chain, [0, 1])
    wait_for(lambda: present(two, chain) == 2, "the next save is stored")


def test_a_defect_in_a_copy_gives_the_reservation_back(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(CpuDevice, "copy", broken)
    one.save(chain_of(2), [0, 1])

    wait_for(lambda: node.stats()["reservations"] == 0, "the reservation is given back")


def test_slots_go_back_when_no_copy_into_them_runs(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that arrives later would be in a page of somebody else."""
    engine, _ = engines
    running: list[CopyPlan] = []
    left: list[int] = []
    abort = engine.client.abort

    def copy(plan: CopyPlan, _sums: PageSums) -> None:
        running.append(plan)  # submitted, and over when somebody waits for it
        raise RuntimeError("the driver takes no more")

    def aborted(reservation: Reservation, timeout: float) -> None:
        left.append(len(running))
        abort(reservation, timeout)

    monkeypatch.setattr(engine.device, "copy", copy)
    monkeypatch.setattr(engine.device, "synchronise", running.clear)
    monkeypatch.setattr(engine.client, "abort", aborted)
    engine.save(chain_of(4), [0, 1, 2, 3])
    wait_for(lambda: bool(left), "the slots went back")
    assert left == [0]


def test_a_save_whose_thread_fails_gives_its_slots_back(
    engines: tuple[Engine, Engine], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody could store these pages as long as the engine lives."""
    engine, _ = engines

    def fail(_mark: object) -> None:
        raise AttributeError("of what is no event")

    monkeypatch.setattr(engine.device, "wait_for", fail)
    engine.save(chain_of(4), [0, 1, 2, 3])
    wait_for(lambda: node.stats()["reservations"] == 0, "the slots went back")
    assert node.counters["pages_aborted"] == 4


def test_a_writer_whose_connection_was_lost_stops_copying(engines: tuple[Engine, Engine], node: Node) -> None:
    """Its slots may belong to somebody else by now."""
    one, two = engines
    chain = chain_of(2)
    batch = one.saver.start([Save(1, "save", 0, NO_PARENT, chain.tails(0, 2), [[0, 1]])])
    wait_for(lambda: node.stats()["reservations"] == 1, "the pages are reserved")
    one.client.drop()
    one.client.connect()
    batch.progress.finish(None)

    first(one.saver.take_over, "the save ends")
    assert present(two, chain) == 0
    assert node.stats()["slots_resting"] == 2


def test_a_process_that_holds_its_share_stores_no_more(engines: tuple[Engine, Engine], node: Node) -> None:
    one, _ = engines
    capacity = 0
    held: list[Reservation] = []
    while True:
        chain = chain_of(1000, seed=len(held) + 10)
        reserved = one.client.reserve(one.namespace, NO_PARENT, list(chain))
        held.append(reserved)
        capacity += len(reserved.granted)
        if len(reserved.granted) < 1000:
            break
    assert capacity > 1000

    one.save(chain_of(2), [0, 1])

    assert node.counters["refused_share"] >= 2


def test_a_prompt_that_is_larger_than_the_pool_keeps_its_beginning(engines: tuple[Engine, Engine]) -> None:
    """What comes behind blocks for which there was no room is of no use, and pushes nothing out."""
    engine, _ = engines
    chain, chunk, kept = chain_of(20_000), 1000, []
    for start in range(0, len(chain), chunk):
        engine.save(chain, [block % BLOCKS for block in range(chunk)], start)
        kept.append(present(engine, chain))
    assert kept[-1] < len(chain)
    assert kept[-1] >= 0.9 * max(kept), "more left than the node keeps free"
