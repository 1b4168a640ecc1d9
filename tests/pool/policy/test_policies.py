"""What every policy promises, over random histories; and what each is for, on small ones."""

from __future__ import annotations

import pytest
from hypothesis import given

from ems.bench.trace.replay import replay
from ems.bench.trace.traffic import made_trace
from ems.config import POLICIES, PolicyName
from tests.kit.examples import examples
from tests.pool.brain import chain, key
from tests.pool.policy.small_index import CAPACITY, CHAINS, REF, Small, steps
from tests.pool.wrong_core import wrong_index

every_policy = pytest.mark.parametrize("name", POLICIES)


@every_policy
@given(history=steps)
def test_a_policy_orders_the_present_pages_and_no_others(name: PolicyName, history: list[tuple[str, int]]) -> None:
    small = Small(name)
    for step, number in history:
        small.do(step, number)
        assert wrong_index(small.index) == []
    everything = len(small.index)
    assert len(small.evict(everything)) == everything
    assert small.index.policy.first() is None
    assert list(small.index.policy) == []


@every_policy
@given(history=steps)
@examples(20)
def test_equal_histories_have_equal_ends(name: PolicyName, history: list[tuple[str, int]]) -> None:
    ones, others = Small(name), Small(name)
    for step, number in history:
        assert ones.do(step, number) == others.do(step, number)
    assert [page.key for page in ones.index.policy] == [page.key for page in others.index.policy]


@every_policy
def test_a_prompt_leaves_from_its_end(name: PolicyName) -> None:
    small = Small(name)
    small.save(CHAINS[0])
    assert small.evict(6) == CHAINS[0][::-1]


@every_policy
def test_a_prefix_that_was_set_aside_can_leave_when_what_hung_on_it_is_called_off(name: PolicyName) -> None:
    small = Small(name)
    first, second = chain("x", 2)
    small.save([first])
    writing = small.index.insert(second, REF, first)
    assert small.evict() == []
    small.index.discard(writing)
    assert small.evict() == [first]


@pytest.mark.parametrize("name", ["forecast", "lru"])
def test_before_anything_was_learned_the_oldest_leave_first(name: PolicyName) -> None:
    small = Small(name)
    for one in "abcdef":
        small.save([key(one)])
    assert small.evict(3) == [key("a"), key("b"), key("c")]


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_what_was_used_again_outlives_what_was_not(name: PolicyName) -> None:
    small = Small(name)
    small.save([key("used")])
    small.use([key("used")])
    for one in range(CAPACITY - 1):
        small.save([key(one)])
    assert key("used") not in small.evict(CAPACITY - 2)


# What the default is for, on traffic that is made up


def shares(kind: str, capacity: int, count: int = 1500) -> tuple[float, float]:
    trace = made_trace(kind, count)
    return replay(trace, capacity, "forecast").share, replay(trace, capacity, "lru").share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "capacity", "times"),
    [("conversations", 1000, 1.0), ("documents", 800, 1.2), ("shifting", 800, 1.0), ("scans", 4000, 1.0)],
)
def test_forecast_is_no_worse_than_lru(kind: str, capacity: int, times: float) -> None:
    forecast, lru = shares(kind, capacity)
    assert forecast >= times * lru


@pytest.mark.slow
def test_forecast_keeps_a_part_of_a_loop_that_is_longer_than_the_pool() -> None:
    forecast, lru = shares("loop", 2000, 3000)
    assert lru == 0
    assert forecast > 0.2
