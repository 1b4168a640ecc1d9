"""The queue of pages to be written: bounded, each page once, batches of one namespace."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.movement.write_back import LINGER, Unit, WriteBackQueue
from tests.pool.wrong import wrong_queue

LIMIT, BATCH, PAGE = 1000, 200, 10


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def queue(behind: WriteBackQueue, namespace: int, keys: list[bytes], now: float = 0.0) -> list[Unit]:
    units = [
        Unit(namespace, 0, tuple(portion), len(portion) * PAGE, now)
        for portion in behind.portions(namespace, keys, PAGE)
    ]
    for unit in units:
        behind.add(unit)
    return units


def test_pages_wait_for_others_but_not_for_long() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    (unit,) = queue(behind, 1, [key(1)])
    assert behind.take(LINGER / 2) == []
    assert behind.take(LINGER) == [unit]


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    (unit,) = queue(behind, 1, [key(1)], now=1000.0)
    assert behind.take(5.0) == [unit]


def test_what_waits_of_one_namespace_is_given_back() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    (first,) = queue(behind, 1, [key(1)])
    (second,) = queue(behind, 2, [key(1)])
    assert behind.give_back(1) == [first]
    assert behind.give_back(1) == []
    assert behind.size == 2 * PAGE, "it counts until it ended"
    behind.ended([first])
    assert (behind.size, (1, key(1)) in behind._known, (2, key(1)) in behind._known) == (PAGE, False, True)
    assert behind.take(LINGER) == [second]
    assert wrong_queue(behind) == []


def test_a_full_batch_does_not_wait() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    units = queue(behind, 1, [key(number) for number in range(20)])
    assert behind.take(0.0) == units


def test_what_comes_when_the_queue_is_full_is_not_taken() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    queue(behind, 1, [key(number) for number in range(150)])
    assert behind.size == LIMIT
    assert behind.dropped == 50
    assert queue(behind, 1, [key(999)]) == []


def test_namespaces_take_turns_and_do_not_mix() -> None:
    behind = WriteBackQueue(LIMIT, BATCH)
    queue(behind, 1, [key(number) for number in range(40)])
    queue(behind, 2, [key(number) for number in range(40)])
    turns = []
    while units := behind.take(1.0):
        assert len({unit.namespace for unit in units}) == 1
        turns.append(units[0].namespace)
    assert turns == [1, 2, 1, 2]


class Queue(RuleBasedStateMachine):
    """Everything that is queued is handed out once or let go once; the bytes are right at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.write_back = WriteBackQueue(LIMIT, BATCH)
        self.now = 0.0
        self.held: dict[tuple[int, bytes], str] = {}
        self.out: list[list[Unit]] = []

    @rule(namespace=st.integers(0, 2), numbers=st.lists(st.integers(0, 60), min_size=1, max_size=30))
    def offer(self, namespace: int, numbers: list[int]) -> None:
        for unit in queue(self.write_back, namespace, [key(number) for number in numbers], self.now):
            assert unit.size <= BATCH
            for one in unit.keys:
                assert (namespace, one) not in self.held, "a page was queued twice"
                self.held[namespace, one] = "waits"

    @rule(seconds=st.sampled_from([0.0, LINGER / 2, LINGER]), hurry=st.booleans())
    def take(self, seconds: float, hurry: bool) -> None:
        self.now += seconds
        units = self.write_back.take(self.now, hurry=hurry)
        if units:
            assert sum(unit.size for unit in units) <= BATCH
            self.out.append(units)
        elif hurry:
            assert "waits" not in self.held.values()
        for unit in units:
            for one in unit.keys:
                assert self.held[unit.namespace, one] == "waits"
                self.held[unit.namespace, one] = "written"

    @rule()
    def end(self) -> None:
        if self.out:
            units = self.out.pop(0)
            self.write_back.ended(units)
            for unit in units:
                for one in unit.keys:
                    del self.held[unit.namespace, one]

    @rule()
    def let_go(self) -> None:
        units = self.write_back.give_back_all()
        self.write_back.ended(units)
        for unit in units:
            for one in unit.keys:
                assert self.held.pop((unit.namespace, one)) == "waits"
        assert "waits" not in self.held.values()

    @invariant()
    def bytes_are_right(self) -> None:
        assert wrong_queue(self.write_back) == []
        assert self.write_back.size == len(self.held) * PAGE <= LIMIT


TestQueue = Queue.TestCase
