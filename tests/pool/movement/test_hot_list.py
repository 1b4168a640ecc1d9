"""What hosts tell each other of hot pages: bounded, told once, copied while they are hot."""

from __future__ import annotations

from collections import Counter
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
    OLD_PERIODS,
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
    hot = HotPages()
    hot.tell(NS, [run(1, 2)], 0.0)
    hot.tell(NS, [run(1, 2)], 1.0)
    assert [hot.take(NS) for _ in range(TOLD_ROUNDS + 1)] == [[run(1, 2)]] * TOLD_ROUNDS + [[]]
    assert not hot.tells(NS, key(2), TELL_AGAIN_SECONDS - 1)
    assert hot.tells("another", key(2), 0.0)
    hot.tell(NS, [run(1, 2)], TELL_AGAIN_SECONDS)
    assert hot.take(NS) == [run(1, 2)]


def test_what_is_cleared_is_told_no_more_and_may_be_told_anew() -> None:
    hot = HotPages()
    for name in (NS, "another"):
        hot.tell(name, [run(1, 2)], 0.0)
        hot.take(name)
    hot.clear(lambda name: name == NS)
    assert (hot.take(NS), hot.take("another")) == ([], [run(1, 2)])
    hot.tell(NS, [run(1, 2)], 1.0)
    assert hot.take(NS) == [run(1, 2)]


def test_what_is_cleared_is_not_copied_back_where_the_list_stayed() -> None:
    """As of a cluster that this node only reads."""
    hot = HotPages()
    hot.tell(NS, [run(1, 2)], 0.0)
    assert hot.heard(NS, [run(3)], 0.0, 100, 0) == [run(3)]
    hot.clear(lambda name: name == NS)
    assert hot.heard(NS, [run(1, 2), run(3)], 100.0, 100, 0) == []
    anew = msgspec.structs.replace(run(3), period=1)
    assert hot.heard(NS, [anew], 100.0, 100, 0) == [anew]


def test_what_this_host_told_it_does_not_copy_back() -> None:
    hot = HotPages()
    hot.tell(NS, [run(1)], 0.0)
    assert hot.heard(NS, [run(1), run(2)], 0.0, 100, 0) == [run(2)]


def test_what_cannot_be_copied_is_tried_rarer_and_then_no_more() -> None:
    hot, now, tried = HotPages(), 0.0, []
    while now < 100:
        if hot.heard(NS, [run(1)], now, 100, 0):
            tried.append(now)
        now += TRY_SECONDS / 2
    pauses = [after - before for before, after in pairwise(tried)]
    assert pauses == [TRY_SECONDS * 2**times for times in range(TRIES - 1)]


def test_what_is_here_is_not_tried_again() -> None:
    hot = HotPages()
    assert hot.heard(NS, [run(1)], 0.0, 100, 0) == [run(1)]
    hot.settled(NS, run(1))
    assert hot.heard(NS, [run(1)], 99.0, 100, 0) == []


def test_what_was_postponed_was_no_try() -> None:
    hot = HotPages()
    for moment in range(3 * TRIES):
        assert hot.heard(NS, [run(1)], float(moment), 100, 0) == [run(1)]
        hot.postponed(NS, run(1), float(moment))


def test_what_could_not_be_copied_is_tried_once_more_when_it_is_used_once_more() -> None:
    """Somebody asks the cluster for each try."""
    hot, tried = HotPages(), Counter[int]()
    for second in range(100 * TRIES):
        period = second // (50 * TRIES)
        tried[period] += len(hot.heard(NS, [msgspec.structs.replace(run(1), period=period)], float(second), 9, period))
    assert tried == {0: TRIES, 1: 1}


def test_what_was_used_long_ago_is_not_copied_and_no_clock_silences_others() -> None:
    hot, now = HotPages(), 1000
    old, late, just = (
        msgspec.structs.replace(run(1, 2), period=now + periods) for periods in (-OLD_PERIODS - 1, OLD_PERIODS + 1, 0)
    )
    assert hot.heard(NS, [old, late], 0.0, 100, now) == []
    assert merged([late], [just]) == [just]
    assert hot.heard(NS, [just], 0.0, 100, now) == [just]


def test_what_was_used_once_more_is_looked_for_once_more() -> None:
    """It may have left this host's memory since it was copied, or told of."""
    hot, later = HotPages(), msgspec.structs.replace(run(1, 2), period=1)
    assert hot.heard(NS, [run(1, 2)], 0.0, 100, 0) == [run(1, 2)]
    hot.settled(NS, run(1, 2))
    assert merged([run(1, 2)], [later]) == [later]
    assert merged([run(1, 2, 3), run(7)], [later]) == [run(1, 2, 3), run(7), later]
    assert merged([later], [run(1, 2), run(1)]) == [later]
    assert hot.heard(NS, [later], 50.0, 100, 0) == [later]
    hot.settled(NS, later)
    assert hot.heard(NS, [later], 99.0, 100, 0) == []
    hot.tell(NS, [later], 99.0)
    assert hot.heard(NS, [later], 99.0, 100, 0) == []


def test_a_round_looks_at_a_bounded_number_of_keys_the_newest_first_and_the_next_at_the_others() -> None:
    hot, listed = HotPages(), [run(number, number + 100) for number in range(1, 10)]
    seen = [hot.heard(NS, listed, 0.0, 4, 0) for _ in range(5)]
    assert [len(one) for one in seen] == [2, 2, 2, 2, 1]
    assert [found for one in seen for found in one] == listed[::-1]


def test_what_is_told_last_is_copied_first_but_behind_what_it_hangs_on() -> None:
    hot, listed = HotPages(), [run(1, 2), run(3, parent=1), run(7), run(4, parent=3), run(8, parent=6)]
    begin, left, other, middle, lost = listed
    assert hot.heard(NS, listed, 0.0, 2, 0) == [lost, begin]
    assert hot.heard(NS, listed, 0.0, 9, 0) == [left, middle, other]
    circle = [run(1, parent=2), run(2, parent=1)]
    assert HotPages().heard(NS, circle, 0.0, 9, 0) == circle


class Hearing(RuleBasedStateMachine):
    """Whatever is heard and told, memory is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.hot = HotPages()
        self.now = 0.0

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(told=st.lists(runs, max_size=4))
    def tell(self, told: list[HotRun]) -> None:
        self.hot.tell(NS, told, self.now)

    @rule(heard=st.lists(runs, max_size=4))
    def hear(self, heard: list[HotRun]) -> None:
        due = self.hot.heard(NS, heard, self.now, 10, 1)
        assert all(found in heard for found in due)

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
        assert (
            sum(run.size for waiting in hot._waiting.values() for run, _ in waiting.values()) <= hot_list.MOST_WAITING
        )


TestHearing = Hearing.TestCase


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_list, "MOST_RUNS", 8)
    monkeypatch.setattr(hot_list, "MOST_WAITING", 100)


def test_a_tenth_of_a_second_of_much_telling_is_bounded() -> None:
    hot = HotPages()
    for number in range(10):
        hot.tell(f"{NS}{number}", [run(*range(1, 5))], 0.0)
        hot.tell(f"{NS}{number}", [run(*range(10, 14)), run(20)], 0.0)
    assert all(sum(one.size for one in hot.take(f"{NS}{number}")) <= hot_list.MOST_WAITING for number in range(10))
