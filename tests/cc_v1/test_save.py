"""What a save does with each answer of the pool, on a pool that answers as told."""

from __future__ import annotations

import time
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ems.cc_v1.arguments import Blocks
from ems.cc_v1.future import CcFuture
from ems.cc_v1.transfers import Transfers
from ems.errors import NoSpace, PoolTimeout, PoolUnavailable, StaleReference
from ems.pool.client.answers import Hits, Namespace, Reservation
from ems.pool.client.pool_client import CommittedAhead, ReservedAhead
from ems.pool.keys import NO_PARENT
from ems.pool.layout import PageRef, unpack_refs
from ems.pool.pages import Outcome
from ems.transfers.device import CpuDevice
from ems.transfers.plan import Numbers, numbers
from ems.transfers.rows import TokenRows
from ems.transfers.summary import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

GRANTED, PRESENT, WRITING, NO_SPACE, NOT_TOUCHED, _ = Outcome
BLOCK = 4


class Segments:
    """Memory of a pretended node, one segment."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(1 << 16))

    def places(self, packed_refs: bytes, size: int) -> tuple[Numbers, list[memoryview]]:
        begin = addressof(c_char.from_buffer(self.memory))
        return numbers(begin + ref.slot * size for ref in unpack_refs(packed_refs)), [self.memory]


class Pool:
    """Answers reservations as told, by key order; everything is granted when the answers are used up."""

    def __init__(self, *answers: Sequence[Outcome]) -> None:
        self.answers = list(answers)
        self.epoch = 1
        self.memory = Segments()
        self.reserved: list[tuple[bytes, list[bytes]]] = []
        self.committed: list[list[int]] = []
        self.aborted = self.called_off = 0
        self.ahead: ReservedAhead | None = None
        """What was asked for and is neither used nor called off."""
        self.commit_fails: Exception | None = None

    def lookup(self, *_: Any, **__: Any) -> Hits:
        return Hits(0, 0, None)

    def begin_reserve(self, namespace: Namespace, parent: bytes, keys: list[bytes], timeout: float) -> ReservedAhead:
        assert self.ahead is None, "one is asked for ahead of the other"
        self.ahead = ReservedAhead(namespace, parent, keys, NoSpace("never sent"))
        return self.ahead

    def call_off(self, ahead: ReservedAhead, timeout: float) -> None:
        assert ahead is self.ahead
        self.ahead = None
        self.called_off += 1

    def end_reserve(self, ahead: ReservedAhead, timeout: float) -> Reservation:
        assert ahead is self.ahead
        self.ahead, (_, parent, keys, _) = None, ahead
        outcomes = list(self.answers.pop(0)) if self.answers else [GRANTED] * len(keys)
        assert len(outcomes) == len(keys)
        self.reserved.append((parent, list(keys)))
        refs = b"".join(PageRef(0, i, 1).pack() for i, outcome in enumerate(outcomes) if outcome == GRANTED)
        return Reservation(self.epoch, 7 if refs else 0, bytes(outcomes), refs)

    def segments(self, epoch: int) -> Segments:
        if epoch != self.epoch:
            raise StaleReference("gone")
        return self.memory

    def begin_commit(
        self, reservation: Reservation, positions: list[int], timeout: float, checksums: Sequence[int], _write: str
    ) -> CommittedAhead:
        assert len(checksums) == len(positions)
        return CommittedAhead(reservation, positions, None)  # type: ignore[arg-type] # as if it were sent

    def end_commit(self, ahead: CommittedAhead, timeout: float) -> None:
        if self.commit_fails is not None:
            raise self.commit_fails
        self.committed.append(list(ahead.positions or ()))

    def abort(self, reservation: Reservation, timeout: float) -> None:
        self.aborted += 1


class Engine:
    """Caches of sixteen blocks, and saves of all of them into ``pool``."""

    def __init__(self, pool: Pool, clock: Any = time.monotonic) -> None:
        rows = TokenRows([[torch.arange(16 * BLOCK * 2, dtype=torch.int64).reshape(16, BLOCK, 1, 2)]])
        self.clock = clock
        self.pool = pool
        self.transfers: Any = Transfers(pool, rows, CpuDevice(), Namespace("n", rows.page_bytes))  # type: ignore[arg-type]

    def save(self, count: int, *, last: int = BLOCK, timeout: float = 5.0) -> CcFuture:
        offsets = [BLOCK] * (count - 1) + [last]
        slots = np.arange(sum(offsets), dtype=np.int64)
        blocks = Blocks(list(range(count)), offsets, slots, block_size=BLOCK, num_blocks=16)
        future = CcFuture(Kind.SAVE, count, timeout, self.clock)
        try:
            self.transfers.save(blocks, future)
        finally:
            assert self.pool.ahead is None
        return future

    def key(self, value: int) -> bytes:
        named: bytes = self.transfers.names.whole(value)
        return named


def test_granted_pages_are_copied_and_committed() -> None:
    pool = Pool()
    assert Engine(pool).save(3).progress == 3
    assert pool.committed == [[0, 1, 2]]
    assert pool.aborted == 0
    assert np.frombuffer(pool.memory.memory, dtype=np.int64)[: 3 * BLOCK * 2].tolist() == list(range(3 * BLOCK * 2))


def test_pages_of_others_count_as_saved_and_are_left_alone() -> None:
    pool = Pool([PRESENT, WRITING, GRANTED, PRESENT])
    assert Engine(pool).save(4).progress == 4
    assert pool.committed == [[2]]


def test_no_space_ends_the_leading_count() -> None:
    pool = Pool([GRANTED, PRESENT, NO_SPACE, GRANTED])
    future = Engine(pool).save(4)
    assert future.progress == 2
    assert pool.committed == [[0]]
    assert pool.aborted == 1, "the page behind the gap is given back"
    assert len(pool.reserved) == 1


def test_memory_that_is_not_touched_yet_is_waited_for() -> None:
    pool = Pool([GRANTED, NOT_TOUCHED, NOT_TOUCHED], [NOT_TOUCHED, NOT_TOUCHED], [GRANTED, GRANTED])
    assert Engine(pool).save(3).progress == 3
    assert [len(keys) for _, keys in pool.reserved] == [3, 2, 2]


def test_but_not_for_long() -> None:
    pool = Pool(*[[NOT_TOUCHED]] * 1000)
    with pytest.raises(NoSpace, match="the node is still making its memory"):
        Engine(pool).save(1)
    assert 1 < len(pool.reserved) < 30


def test_nor_again_while_it_is_in_vain() -> None:
    """Saves queue behind each other: each must not wait for itself what the one before waited for in vain."""
    pool = Pool(*[[NOT_TOUCHED]] * 1000)
    engine = Engine(pool)
    with pytest.raises(NoSpace):
        engine.save(1)
    asked = len(pool.reserved)
    for _ in range(20):
        with pytest.raises(NoSpace):
            engine.save(1)
    assert len(pool.reserved) - asked == 20, "each asks once"

    pool.answers.clear()
    assert engine.save(1).progress == 1
    pool.answers += [[NOT_TOUCHED], [GRANTED]]
    assert engine.save(1).progress == 1


def test_and_not_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(*[[NOT_TOUCHED]] * 1000)
    monkeypatch.setattr("ems.cc_v1.transfers.TOUCH_PATIENCE", 60.0)
    begin = time.monotonic()
    assert Engine(pool).save(1, timeout=0.1).progress == 0
    assert time.monotonic() - begin < 30.0


def test_blocks_hang_on_the_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ems.cc_v1.transfers.RESERVATION_BYTES", 1)
    pool = Pool()
    engine = Engine(pool)
    engine.save(3)
    assert [parent for parent, _ in pool.reserved] == [NO_PARENT, engine.key(0), engine.key(1)]


def test_the_first_block_hangs_on_what_was_before_it_in_an_earlier_call() -> None:
    pool = Pool()
    engine = Engine(pool)
    engine.transfers.names.remember([88, 99, 0])
    engine.save(1)
    assert [parent for parent, _ in pool.reserved] == [engine.key(99)]


def test_a_block_that_lacks_tokens_is_reserved_apart() -> None:
    pool = Pool()
    engine = Engine(pool)
    assert engine.save(3, last=1).progress == 3
    assert [len(keys) for _, keys in pool.reserved] == [2, 1]
    assert pool.reserved[1][0] == engine.key(1)
    assert pool.reserved[1][1] == [engine.transfers.names.beginning(2)]


def test_large_saves_are_committed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    engine = Engine(pool)
    monkeypatch.setattr("ems.cc_v1.transfers.RESERVATION_BYTES", 2 * engine.transfers.namespace.page_size)
    assert engine.save(5).progress == 5
    assert pool.committed == [[0, 1], [0, 1], [0]]


def test_a_deadline_in_the_middle_keeps_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    pool = Pool()
    now = [0.0]
    engine = Engine(pool, clock=lambda: now[0])
    original = engine.transfers.device.copy

    def slow(*arguments: Any) -> None:
        original(*arguments)
        now[0] += 0.4

    monkeypatch.setattr(engine.transfers.device, "copy", slow)
    future = engine.save(5, timeout=1.0)
    assert pool.committed == [[0, 1, 2]]
    assert pool.aborted == 1
    assert future.progress == 3


def test_slots_go_back_when_no_copy_into_them_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that arrives later would be in a page of somebody else."""
    pool, running, left = Pool(), list[object](), list[int]()
    engine, abort = Engine(pool), pool.abort

    def copy(plan: object, *_: object) -> None:
        running.append(plan)  # submitted, and over when somebody waits for it
        raise RuntimeError("the driver takes no more")

    def aborted(reservation: Reservation, timeout: float) -> None:
        left.append(len(running))
        abort(reservation, timeout)

    monkeypatch.setattr(engine.transfers.device, "copy", copy)
    monkeypatch.setattr(engine.transfers.device, "synchronise", running.clear)
    monkeypatch.setattr(pool, "abort", aborted)
    with pytest.raises(RuntimeError, match="takes no more"):
        engine.save(5)
    assert left == [0]


class TestOneAfterTheOther:
    """The next slots are asked for while pages are copied, and commits are answered later."""

    @pytest.fixture
    def pool(self) -> Pool:
        return Pool()

    @pytest.fixture
    def engine(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Engine:
        engine = Engine(pool)
        monkeypatch.setattr("ems.cc_v1.transfers.RESERVATION_BYTES", 2 * engine.transfers.namespace.page_size)
        return engine

    def test_slots_that_were_refused_ahead_are_asked_for_again_when_those_before_are_committed(
        self, pool: Pool, engine: Engine
    ) -> None:
        pool.answers = [[GRANTED] * 2, [GRANTED, NO_SPACE], [GRANTED] * 2]
        assert engine.save(5).progress == 5
        assert pool.committed == [[0, 1], [0], [0, 1]]
        assert [len(keys) for _, keys in pool.reserved] == [2, 2, 2]

    def test_and_once_more_only(self, pool: Pool, engine: Engine) -> None:
        pool.answers = [[GRANTED] * 2, [NO_SPACE] * 2, [NO_SPACE] * 2]
        assert engine.save(6).progress == 2
        assert len(pool.reserved) == 3
        assert pool.called_off == 0, "what follows a refusal is not asked for: pages would leave for it"

    def test_a_copy_that_breaks_costs_those_before_it_nothing(
        self, pool: Pool, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy, made = engine.transfers.device.copy, []

        def breaks(*arguments: Any) -> None:
            made.append(1)
            if len(made) == 2:
                raise StaleReference("gone")
            copy(*arguments)

        monkeypatch.setattr(engine.transfers.device, "copy", breaks)
        with pytest.raises(StaleReference):
            engine.save(6)
        assert pool.committed == [[0, 1]]
        assert (pool.aborted, pool.called_off) == (1, 1)

    def test_a_commit_that_fails_ends_the_leading_count(
        self, pool: Pool, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commits, end, progress = [], pool.end_commit, []

        def fails(commit: CommittedAhead, timeout: float) -> None:
            commits.append(commit)
            if commit is commits[0]:
                raise StaleReference("gone")
            end(commit, timeout)

        monkeypatch.setattr(pool, "end_commit", fails)
        monkeypatch.setattr(CcFuture, "advance", lambda _, value: progress.append(value))
        with pytest.raises(StaleReference):
            engine.save(6)
        assert progress == []
        assert pool.aborted == 2, "nobody knows of the second either"


@pytest.mark.parametrize("error", [StaleReference("gone"), PoolTimeout("late"), PoolUnavailable("gone")])
def test_a_commit_that_fails_saved_nothing(error: Exception) -> None:
    pool = Pool()
    pool.commit_fails = error
    engine = Engine(pool)
    with pytest.raises(type(error)):
        engine.save(2)
    assert pool.aborted == 1


def test_a_connection_lost_while_copying_stops_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are somebody else's soon: whoever was cut off must not write into them for long."""
    monkeypatch.setattr(CpuDevice, "batch_bytes", 1)
    pool = Pool()
    engine = Engine(pool)
    copies = []

    def cut_off(*_: Any) -> None:
        copies.append(1)
        pool.epoch = 2

    monkeypatch.setattr(engine.transfers.device, "copy", cut_off)
    with pytest.raises(StaleReference):
        engine.save(5)
    assert len(copies) == 1
    assert pool.committed == []
