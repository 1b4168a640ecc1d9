"""What hosts tell each other of hot pages: bounded, told once, copied no faster than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.keys import NO_PARENT, Tail, page_keys, split_keys
from ems.pool.movement import hot_list
from ems.pool.movement.hot_list import (
    MOST_RUN_KEYS,
    TELL_AGAIN_SECONDS,
    TOLD_ROUNDS,
    TRIES,
    TRY_SECONDS,
    HotPages,
    HotRun,
    merged,
    runs_of,
)

ROOT = bytes(NO_PARENT)
NS = "t/m/l"


class Stored(msgspec.Struct, frozen=True):
    key: bytes
    parent: bytes
    tail: Tail | None = None


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def run(*numbers: int, parent: int = 0, tail: Tail | None = None) -> HotRun:
    return HotRun(key(parent), b"".join(map(key, numbers)), tail)


def chain(numbers: Sequence[int], parent: bytes = ROOT) -> list[Stored]:
    keys = [key(number) for number in numbers]
    return [Stored(one, before) for one, before in zip(keys, [parent, *keys[:-1]], strict=True)]


def test_pages_of_a_prompt_are_one_run_and_of_several_prompts_one_each() -> None:
    assert runs_of([]) == []
    assert runs_of(chain([1, 2, 3])) == [run(1, 2, 3)]
    assert runs_of([*chain([1, 2]), *chain([5, 6], key(9)), *chain([3], key(2))]) == [run(1, 2, 3), run(5, 6, parent=9)]


def test_the_shards_of_a_prompt_are_a_run_each() -> None:
    chunks = [key(number) for number in (1, 2, 3)]
    rows = [split_keys(page_keys(chunk, 3)) for chunk in chunks]
    before = [[ROOT] * 3, *rows]
    pages = [Stored(row[shard], before[at][shard]) for at, row in enumerate(rows) for shard in range(3)]
    assert runs_of(pages) == [HotRun(ROOT, b"".join(row[shard] for row in rows)) for shard in range(3)]


def test_only_a_page_by_itself_is_told_with_its_tail() -> None:
    tail = Tail(key(1), b"abcd")
    alone = Stored(bytes(tail.key), key(2), tail)
    assert runs_of([alone]) == [HotRun(key(2), alone.key, tail)]
    assert runs_of([*chain([1, 2]), alone])[0].tail is None


@given(st.integers(0, 3 * MOST_RUN_KEYS))
def test_long_prompts_are_cut_and_nothing_is_lost(count: int) -> None:
    pages = chain(range(1, count + 1)) if count else []
    found = runs_of(pages)
    assert [one for part in found for one in part.keys] == [page.key for page in pages]
    assert all(part.pages <= MOST_RUN_KEYS for part in found)
    assert all(after.parent == before.last for before, after in pairwise(found))


def test_a_longer_run_takes_the_place_of_its_beginning() -> None:
    assert merged([run(1, 2), run(7)], [run(1, 2, 3)]) == [run(7), run(1, 2, 3)]
    assert merged([run(1, 2)], [run(1, 2)]) == [run(1, 2)]
    tail = Tail(key(1), b"abcd")
    listed = HotRun(key(2), bytes(tail.key), tail)
    more = HotRun(key(2), listed.packed + key(4))
    assert merged([listed], [more]) == [listed, more], "nothing else says by which tokens it is found"


numbers = st.integers(1, 6)
runs = st.builds(
    lambda first, count, period: msgspec.structs.replace(run(*range(first, first + count)), period=period),
    *(numbers, numbers, st.integers(0, 2)),
)


@given(st.lists(runs, max_size=6), st.lists(runs, max_size=6), st.lists(runs, max_size=6))
def test_merging_loses_nothing_and_comes_to_rest(
    listed: list[HotRun], mine: list[HotRun], theirs: list[HotRun]
) -> None:
    once = merged(listed, mine)
    both = merged(once, theirs)
    assert {one for found in both for one in found.keys} == {
        one for found in [*listed, *mine, *theirs] for one in found.keys
    }
    assert merged(once, mine) == once
    assert merged(both, mine) == merged(both, theirs) == both


def test_what_was_told_is_told_in_a_few_rounds_and_not_again_soon() -> None:
    hot = HotPages(1.0)
    hot.tell(NS, [run(1, 2)], 0.0)
    hot.tell(NS, [run(1, 2)], 1.0)
    assert [hot.take(NS) for _ in range(TOLD_ROUNDS + 1)] == [[run(1, 2)]] * TOLD_ROUNDS + [[]]
    assert not hot.tells(NS, key(2), TELL_AGAIN_SECONDS - 1)
    assert hot.tells("another", key(2), 0.0)
    hot.tell(NS, [run(1, 2)], TELL_AGAIN_SECONDS)
    assert hot.take(NS) == [run(1, 2)]


def test_what_is_cleared_is_told_no_more_and_may_be_told_anew() -> None:
    hot = HotPages(1.0)
    for name in (NS, "another"):
        hot.tell(name, [run(1, 2)], 0.0)
        hot.take(name)
    hot.clear(lambda name: name == NS)
    assert (hot.take(NS), hot.take("another")) == ([], [run(1, 2)])
    hot.tell(NS, [run(1, 2)], 1.0)
    assert hot.take(NS) == [run(1, 2)]


def test_what_is_cleared_is_not_copied_back_where_the_list_stayed() -> None:
    """As of a cluster that this node only reads."""
    hot = HotPages(1.0)
    hot.tell(NS, [run(1, 2)], 0.0)
    (heard,) = hot.heard(NS, [run(3)], 0.0, 100)
    hot.copied(NS, heard.keys)
    hot.clear(lambda name: name == NS)
    assert hot.heard(NS, [run(1, 2), run(3)], 100.0, 100) == []
    assert hot.used(NS, heard.keys) == 0, "what is computed anew was not copied"
    anew = msgspec.structs.replace(run(3), period=1)
    assert hot.heard(NS, [anew], 100.0, 100) == [anew]


def test_what_this_host_told_it_does_not_copy_back() -> None:
    hot = HotPages(1.0)
    hot.tell(NS, [run(1)], 0.0)
    assert hot.heard(NS, [run(1), run(2)], 0.0, 100) == [run(2)]


def test_what_cannot_be_copied_is_tried_rarer_and_then_no_more() -> None:
    hot, now, tried = HotPages(1.0), 0.0, []
    while now < 100:
        if hot.heard(NS, [run(1)], now, 100):
            tried.append(now)
        now += TRY_SECONDS / 2
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses == [TRY_SECONDS * 2**times for times in range(TRIES - 1)]


def test_what_was_postponed_was_no_try_and_what_is_here_is_not_tried_again() -> None:
    hot = HotPages(1.0)
    for moment in range(3 * TRIES):
        assert hot.heard(NS, [run(1)], float(moment), 100) == [run(1)]
        hot.postponed(NS, [run(1)], float(moment))
    hot.heard(NS, [run(1)], 50.0, 100)
    hot.settled(NS, run(1))
    assert hot.heard(NS, [run(1)], 99.0, 100) == []


def test_what_was_used_once_more_is_looked_for_once_more() -> None:
    """It may have left this host's memory since it was copied, or told of."""
    hot, later = HotPages(1.0), msgspec.structs.replace(run(1, 2), period=1)
    assert hot.heard(NS, [run(1, 2)], 0.0, 100) == [run(1, 2)]
    hot.settled(NS, run(1, 2))
    assert merged([run(1, 2)], [later]) == [later]
    assert merged([run(1, 2, 3), run(7)], [later]) == [run(1, 2, 3), run(7), later]
    assert merged([later], [run(1, 2), run(1)]) == [later]
    assert hot.heard(NS, [later], 50.0, 100) == [later]
    hot.settled(NS, later)
    assert hot.heard(NS, [later], 99.0, 100) == []
    hot.tell(NS, [later], 99.0)
    assert hot.heard(NS, [later], 99.0, 100) == []


def test_a_round_looks_at_a_bounded_number_of_keys_and_the_next_at_the_others() -> None:
    hot, listed = HotPages(1.0), [run(number, number + 100) for number in range(1, 10)]
    seen = [hot.heard(NS, listed, 0.0, 4) for _ in range(5)]
    assert [len(one) for one in seen] == [2, 2, 2, 2, 1]
    assert [found for one in seen for found in one] == listed


def test_pages_that_were_copied_count_as_used_once() -> None:
    hot = HotPages(1.0)
    hot.copied(NS, [key(1), key(2)])
    assert hot.used(NS, [key(2), key(3)]) == 1
    assert hot.used(NS, [key(2), key(3)]) == 0
    assert hot.used("another", [key(1)]) == 0


class Copying(RuleBasedStateMachine):
    """Whatever is heard and told: no more is copied than the rate allows, and memory is bounded."""

    RATE = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.hot = HotPages(self.RATE)
        self.now = 0.0
        self.copied: list[tuple[float, int]] = []

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(size=st.integers(1, 300))
    def copy(self, size: int) -> None:
        if self.hot.may_copy(size, self.now):
            self.copied.append((self.now, size))

    @rule(told=st.lists(runs, max_size=4))
    def tell(self, told: list[HotRun]) -> None:
        self.hot.tell(NS, told, self.now)

    @rule(heard=st.lists(runs, max_size=4))
    def hear(self, heard: list[HotRun]) -> None:
        due = self.hot.heard(NS, heard, self.now, 10)
        assert all(found in heard for found in due)
        self.hot.copied(NS, [one for found in due for one in found.keys])

    @rule()
    def clear(self) -> None:
        self.hot.clear(lambda name: name == NS)
        assert self.hot.take(NS) == []

    @rule()
    def take(self) -> None:
        self.hot.take(NS)

    @invariant()
    def is_bounded(self) -> None:
        hot = self.hot
        assert len(hot._runs) <= hot_list.MOST_RUNS
        assert len(hot._copied) <= hot_list.MOST_COPIED
        assert (
            sum(run.size for waiting in hot._waiting.values() for run, _ in waiting.values()) <= hot_list.MOST_WAITING
        )

    @invariant()
    def keeps_to_its_rate(self) -> None:
        """In any time no more than the rate, the room of one second, and the last one that was begun."""
        for at, (begin, _) in enumerate(self.copied):
            total = sum(size for _, size in self.copied[at:])
            largest = max((size for _, size in self.copied[at:]), default=0)
            assert total <= self.RATE * (self.copied[-1][0] - begin + 1) + largest + 1e-6


TestCopying = Copying.TestCase


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_list, "MOST_RUNS", 8)
    monkeypatch.setattr(hot_list, "MOST_COPIED", 12)
    monkeypatch.setattr(hot_list, "MOST_WAITING", 100)


def test_what_nobody_uses_is_copied_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_list, "LEARNED", 4)
    hot = HotPages(16.0)
    hot.copied(NS, map(key, range(8)))
    assert 14 <= sum(hot.may_copy(4, 100.0 + second) for second in range(64)) <= 18
    assert hot.used(NS, [key(0)]) == 1
    assert sum(hot.may_copy(4, 200.0 + second) for second in range(64)) == 64


def test_a_tenth_of_a_second_of_much_telling_is_bounded() -> None:
    hot = HotPages(1.0)
    for number in range(10):
        hot.tell(f"{NS}{number}", [run(*range(1, 5))], 0.0)
        hot.tell(f"{NS}{number}", [run(*range(10, 14)), run(20)], 0.0)
    assert all(sum(one.size for one in hot.take(f"{NS}{number}")) <= hot_list.MOST_WAITING for number in range(10))
