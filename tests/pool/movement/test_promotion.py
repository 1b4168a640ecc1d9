"""What is fetched, in which order, and never too much at once."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.movement.promotion import MAX_WANTED_TENANT, MAX_WANTS, PATIENCE, Portion, Promotions
from tests.pool.wrong import wrong_promotions

LIMIT, BATCH, PAGE = 100, 40, 10
ROOT = bytes(16)


def chain(name: int, length: int) -> list[bytes]:
    return [bytes([name, block]) + bytes(14) for block in range(length)]


def ask(promotions: Promotions, keys: list[bytes], now: float = 0.0, *, urgent: bool = True, tier: int = 0) -> bool:
    return promotions.ask(tier, 0, PAGE, ROOT, keys, now, urgent=urgent)


def test_a_run_comes_in_portions_in_order() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    keys = chain(1, 9)
    ask(promotions, keys)
    portions = [promotions.next(0.0), promotions.next(0.0), promotions.next(0.0)]
    assert [portion.keys for portion in portions if portion] == [tuple(keys[:4]), tuple(keys[4:8]), tuple(keys[8:])]
    assert [portion.parent for portion in portions if portion] == [ROOT, keys[3], keys[7]]
    assert promotions.next(0.0) is None


def test_what_was_looked_up_comes_before_what_was_announced() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 2), urgent=False)
    ask(promotions, chain(2, 2))
    first = promotions.next(0.0)
    assert first is not None
    assert first.keys == tuple(chain(2, 2))


def test_nothing_more_is_wanted_of_a_namespace_that_is_forgotten() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 9))
    promotions.ask(0, 7, PAGE, ROOT, chain(2, 2), 0.0, urgent=False)
    first = promotions.next(0.0)
    assert first is not None
    assert promotions.wants(0, chain(1, 9)[4])
    promotions.forget(0)
    assert not promotions.wants(0, chain(1, 9)[4])
    second = promotions.next(0.0)
    assert second is not None
    assert second.namespace == 7
    assert promotions.next(0.0) is None
    assert wrong_promotions(promotions) == []


def test_what_nobody_waits_for_is_not_before_what_is_urgent() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 3), urgent=False)
    ask(promotions, chain(2, 2))
    assert (promotions.waiting(0), promotions.waiting(0, urgent=True)) == (5 * PAGE, 2 * PAGE)
    ask(promotions, chain(1, 3))
    assert promotions.waiting(0, urgent=True) == 5 * PAGE


def test_one_tenants_wants_are_bounded_and_leave_room_for_anothers() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH, lambda namespace: "ann" if namespace < 100 else "bob")
    run = [number.to_bytes(16, "big") for number in range(65_536)]
    asked = [promotions.ask(0, number, PAGE, ROOT, run, 0.0, urgent=False) for number in range(10)]
    assert asked.count(True) == MAX_WANTED_TENANT // 65_536
    assert promotions.ask(0, 100, PAGE, ROOT, run, 0.0, urgent=False)
    promotions.forget(0)
    assert promotions.ask(0, 9, PAGE, ROOT, run, 0.0, urgent=False)
    assert wrong_promotions(promotions) == []


def test_many_wants_of_one_tenant_keep_none_of_another_waiting() -> None:
    promotions = Promotions(MAX_WANTS * PAGE, lambda _tier: PAGE, lambda namespace: ("ann", "bob")[namespace])
    many = [number.to_bytes(16, "big") for number in range(MAX_WANTS + 1)]
    assert [ask(promotions, [key]) for key in many] == [True] * MAX_WANTS + [False]
    assert promotions.ask(0, 1, PAGE, ROOT, many[:3], 0.0, urgent=True)
    assert promotions.ask(0, 1, PAGE, ROOT, many[3:5], 0.0, urgent=False)
    portions = [promotions.next(0.0) for _ in range(8)]
    assert [portion.namespace for portion in portions if portion] == [0, 1, 0, 1, 0, 1, 0, 0], "what is urgent first"
    assert [portion.keys for portion in portions if portion and portion.namespace] == [(key,) for key in many[:3]]
    assert wrong_promotions(promotions) == []


def test_no_more_is_under_way_than_allowed() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 30))
    out = []
    while (portion := promotions.next(0.0)) is not None:
        out.append(portion)
    assert sum(portion.size for portion in out) == LIMIT
    promotions.ended(out[0])
    assert promotions.next(0.0) is not None


def test_a_page_larger_than_the_limit_comes_alone() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    promotions.ask(0, 0, 5 * LIMIT, ROOT, chain(1, 2), 0.0, urgent=True)
    portion = promotions.next(0.0)
    assert portion is not None
    assert len(portion.keys) == 1
    assert promotions.next(0.0) is None
    promotions.ended(portion)
    assert promotions.next(0.0) is not None


def test_asking_again_does_not_fetch_twice() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    for now in range(5):
        ask(promotions, chain(1, 3), now)
    assert promotions.waiting(0) == 30
    assert promotions.next(0.0) is not None
    assert promotions.next(0.0) is None


def test_what_nobody_asks_for_any_more_is_let_go() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 3))
    assert promotions.next(PATIENCE) is None
    assert not len(promotions)


def test_too_many_wants_are_refused() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    for number in range(MAX_WANTS):
        assert ask(promotions, [number.to_bytes(16, "big")])
    assert not ask(promotions, chain(9, 1))


def test_what_follows_a_portion_without_room_is_dropped() -> None:
    promotions = Promotions(LIMIT, lambda _tier: BATCH)
    ask(promotions, chain(1, 9))
    ask(promotions, chain(2, 1))
    portion = promotions.next(0.0)
    assert portion is not None
    promotions.no_room(portion)
    assert promotions.waiting(0) == PAGE


class Fetching(RuleBasedStateMachine):
    """The bytes under way and waiting are right at every moment; a cut tier is asked nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.promotions = Promotions(LIMIT, lambda _tier: BATCH)
        self.now = 0.0
        self.out: list[Portion] = []

    @rule(
        name=st.integers(0, 3),
        start=st.integers(0, 5),
        length=st.integers(1, 12),
        tier=st.integers(0, 1),
        urgent=st.booleans(),
    )
    def ask(self, name: int, start: int, length: int, tier: int, *, urgent: bool) -> None:
        ask(self.promotions, chain(name, start + length)[start:], self.now, tier=tier, urgent=urgent)

    @rule()
    def go_on(self) -> None:
        portion = self.promotions.next(self.now)
        if portion is not None:
            assert portion.size == len(portion.keys) * PAGE <= BATCH
            self.out.append(portion)

    @rule()
    def end(self) -> None:
        if self.out:
            self.promotions.ended(self.out.pop(0))

    @rule(tier=st.integers(0, 1))
    def cut(self, tier: int) -> None:
        self.promotions.cut(tier)
        assert self.promotions.waiting(tier) == 0

    @rule()
    def no_room(self) -> None:
        if self.out:
            self.promotions.no_room(self.out[-1])

    @rule(seconds=st.sampled_from([1.0, PATIENCE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_right(self) -> None:
        assert wrong_promotions(self.promotions) == []
        assert self.promotions.under_way == sum(portion.size for portion in self.out) <= LIMIT


TestFetching = Fetching.TestCase
