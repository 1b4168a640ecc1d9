"""Worth, history and memory: the arithmetic behind the default policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ems.pool.policy.reuse import EDGES, FOLLOWED, MOST_USES, OLDEST, SPAN_OF_AGE, ReuseHistory, UseMemory, worth_by_age
from tests.pool.brain import key

SPANS = len(EDGES)


def test_spans_cover_every_age_once() -> None:
    assert len(SPAN_OF_AGE) >= OLDEST + 1
    assert [SPAN_OF_AGE.index(span) for span in range(SPAN_OF_AGE[OLDEST] + 1)] == EDGES[: SPAN_OF_AGE[OLDEST] + 1]


def test_with_nothing_seen_the_older_is_worth_less() -> None:
    worth = worth_by_age(np.zeros((2, SPANS)), np.zeros((2, SPANS)))
    assert (np.diff(worth, axis=1) <= 1e-12).all()
    assert np.array_equal(worth[0], worth[1])


def lives(again: dict[int, float], of: float = 1000.0) -> tuple[list[float], list[float]]:
    """Lives of one class, ``of`` of them, some used again in the spans of ``again``."""
    ends = [again.get(span, 0.0) for span in range(SPANS)]
    reached = [of - sum(ends[:span]) for span in range(SPANS)]
    return ends, reached


def test_what_is_never_used_again_is_worth_less_than_what_is() -> None:
    ends, reached = zip(lives({}), lives({3: 500.0}), strict=True)
    worth = worth_by_age(np.array(ends), np.array(reached))
    assert (worth[0][:4] < worth[1][:4]).all()


def test_in_a_loop_a_page_is_worth_more_the_nearer_its_turn() -> None:
    ends, reached = lives({9: 990.0})
    worth = worth_by_age(np.array([ends]), np.array([reached]))[0]
    assert (np.diff(worth[:10]) > 0).all()
    assert worth[12] < worth[0]


@given(arrays.arrays(np.float64, (3, SPANS), elements=st.floats(0, 1e6)))
def test_worth_is_a_number_for_whatever_was_counted(again: np.ndarray) -> None:
    reached = np.cumsum(again[:, ::-1], axis=1)[:, ::-1]
    worth = worth_by_age(again, reached)
    assert np.isfinite(worth).all()
    assert (worth >= 0).all()


# History


def test_a_life_is_counted_where_it_began_where_it_went_and_where_it_ended() -> None:
    history = ReuseHistory(2, 100)
    history.see(key("a"), 0)
    for _ in range(3):
        history.next_epoch()
    history.see(key("a"), 1)
    assert history.again[0, SPAN_OF_AGE[3]] == history.again.sum() == 1
    assert history.reached[0, : SPAN_OF_AGE[3] + 2].tolist() == [1.0] * (SPAN_OF_AGE[3] + 1) + [0.0]
    assert history.reached[1].sum() == 1


def test_the_history_follows_a_bounded_number_of_keys() -> None:
    history = ReuseHistory(1, 4 * FOLLOWED)
    assert history.mask > 0
    for number in range(40 * FOLLOWED // 16):
        history.see(number.to_bytes(14) + (number * (history.mask + 1) % 65536).to_bytes(2), 0)
    assert len(history._followed) <= FOLLOWED


@given(st.integers(1, 10**7))
def test_more_capacity_means_a_smaller_sample(capacity: int) -> None:
    mask = ReuseHistory(1, capacity).mask
    assert mask & (mask + 1) == 0
    assert mask < 65536


# Memory


def test_uses_are_remembered_until_another_key_takes_the_place() -> None:
    memory = UseMemory(1)
    memory.put(key("a"), 5)
    assert memory.get(key("a")) == 5
    memory.put(key("b"), 1000)
    assert (memory.get(key("a")), memory.get(key("b"))) == (0, MOST_USES)


@pytest.mark.parametrize("entries", [64, 4096])
def test_a_key_is_hardly_ever_taken_for_another(entries: int) -> None:
    memory = UseMemory(entries)
    for number in range(entries):
        memory.put(key(number), 3)
    strangers = sum(memory.get(key(f"other {number}")) > 0 for number in range(4000))
    assert strangers < 40
