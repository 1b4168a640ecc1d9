"""What every policy promises, over random histories; and what each is for, on small ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ems.bench.trace.made import made_trace
from ems.bench.trace.replay import replay
from ems.config import POLICIES, PolicyName
from ems.pool.core.index import Index, Page
from ems.pool.keys import NO_PARENT
from ems.pool.policy.seam import make_policy
from ems.pool.segments.layout import PageRef
from tests.pool.brain import chain, key

REF = PageRef(0, 0, 1, 0).pack()
CAPACITY = 12

every_policy = pytest.mark.parametrize("name", POLICIES)

steps = st.lists(
    st.tuples(st.sampled_from(["save", "save", "use", "evict", "spare", "drop", "resize"]), st.integers(0, 11)),
    max_size=80,
)
CHAINS = [chain("a", 6), chain("b", 4), [*chain("a", 3), *chain("c", 3)], [key("d")]]


class Small:
    """An index of a few pages, and what a plain account says is in it."""

    def __init__(self, name: PolicyName) -> None:
        self.index = Index(make_policy(name))
        self.index.policy.resize(CAPACITY)

    def save(self, keys: list[bytes]) -> None:
        before, pages = bytes(NO_PARENT), []
        for one in keys:
            if self.index.get(one) is None:
                pages.append(self.index.insert(one, REF, before))
            before = one
        self.index.publish(pages)

    def use(self, keys: list[bytes]) -> None:
        self.index.use(self.index.leading(keys))

    def evict(self, count: int = 1) -> list[bytes]:
        left: list[bytes] = []
        for _ in range(4 * len(self.index)):
            page = self.index.policy.first()
            if page is None or len(left) == count:
                break
            if page.suffixes is not None:
                self.index.policy.spare(page)
                continue
            left.append(page.key)
            self.index.discard(page)
        return left

    def do(self, step: str, number: int) -> list[bytes]:
        keys = CHAINS[number % len(CHAINS)]
        if step == "save":
            self.save(keys[: number // 2 + 1])
        elif step == "use":
            self.use(keys[: number // 2 + 1])
        elif step == "evict":
            return self.evict(number // 3)
        elif step == "resize":
            self.index.policy.resize((number + 1) * 3)
        elif (page := self.index.policy.first()) is not None:
            if step == "spare":
                self.index.policy.spare(page)
            else:
                leaf: Page = page
                while leaf.suffixes is not None:
                    leaf = min(leaf.children(), key=lambda one: one.key)
                self.index.discard(leaf)
        return []


@every_policy
@given(history=steps)
@settings(max_examples=60)
def test_a_policy_orders_the_present_pages_and_no_others(name: PolicyName, history: list[tuple[str, int]]) -> None:
    small = Small(name)
    for step, number in history:
        small.do(step, number)
        assert small.index.check() == []
    everything = len(small.index)
    assert len(small.evict(everything)) == everything
    assert small.index.policy.first() is None
    assert list(small.index.policy) == []


@every_policy
@given(history=steps)
@settings(max_examples=20)
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


def test_uses_go_along_to_another_process() -> None:
    small, successor = Small("forecast"), Small("forecast")
    small.save(CHAINS[0])
    small.use(CHAINS[0][:2])
    small.use(CHAINS[0][:1])
    successor.index.resume(small.index.snapshot())
    assert [page.uses for page in successor.index.leading(CHAINS[0])] == [3, 2, 1, 1, 1, 1]
    assert successor.index.check() == []
    assert successor.evict(6) == CHAINS[0][::-1]


@every_policy
def test_a_policy_that_takes_over_knows_the_same_pages(name: PolicyName) -> None:
    small, successor = Small(name), Small(name)
    for keys in CHAINS:
        small.save(keys)
    small.use(CHAINS[2])
    successor.index.resume(small.index.snapshot())
    assert {page.key for page in successor.index.policy} == {page.key for page in small.index.policy}
    assert successor.index.check() == []


# What the default is for, on traffic that is made up


def shares(kind: str, capacity: int, count: int = 1500) -> tuple[float, float]:
    trace = made_trace(kind, count)
    return replay(trace, capacity, "forecast").share, replay(trace, capacity, "lru").share


@pytest.mark.parametrize(
    ("kind", "capacity", "times"),
    [("conversations", 1000, 1.0), ("documents", 800, 1.2), ("shifting", 800, 1.0), ("scans", 4000, 1.0)],
)
def test_forecast_is_no_worse_than_lru(kind: str, capacity: int, times: float) -> None:
    forecast, lru = shares(kind, capacity)
    assert forecast >= times * lru


def test_forecast_keeps_a_part_of_a_loop_that_is_longer_than_the_pool() -> None:
    forecast, lru = shares("loop", 2000, 3000)
    assert lru == 0
    assert forecast > 0.2
