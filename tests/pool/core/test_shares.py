"""Quotas: what always holds over random histories of several tenants, and single promises."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ems.errors import ConfigError, QuotaExceeded
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.shares import Quota
from ems.pool.names import qualified, tenant_of
from ems.pool.pages import Outcome
from tests.kit.examples import examples
from tests.pool.brain import PAGE, chain, core_of, key, outcomes, present, save, segment_for
from tests.pool.wrong_core import wrong_core

SLOTS = 2
SEGMENT = segment_for(SLOTS)


def core_for(segments: int, **quotas: Quota) -> PoolCore:
    core = core_of(*[SLOTS] * segments)
    core.set_quotas(quotas)
    return core


def segments_of(core: PoolCore, tenant: str) -> int:
    namespaces = [segment.namespace for segment in core.slots.segments]
    return sum(
        1 for client_id in namespaces if client_id is not None and tenant_of(core.namespaces[client_id].name) == tenant
    )


def settle(core: PoolCore) -> None:
    """All memory that was replaced has been touched."""
    for number, segment in enumerate(core.slots.segments):
        core.slots.touch(number, segment.size)
    core.slots.touching_ended()


def fill(core: PoolCore, namespace: int, name: str, count: int) -> list[Outcome]:
    done = []
    for number in range(count):
        done += outcomes(save(core, namespace, [key(f"{name}{number}")]))
        settle(core)
    return done


def test_a_tenant_never_has_more_than_its_cap() -> None:
    core = core_for(4, ann=Quota(cap="50%"), bob=Quota())
    ann = core.open_namespace(qualified("ann", "m"), PAGE)
    assert fill(core, ann, "x", 20) == [Outcome.GRANTED] * 20
    assert segments_of(core, "ann") == 2
    assert wrong_core(core) == []


def test_a_guaranteed_minimum_is_never_taken_by_others() -> None:
    core = core_for(4, ann=Quota(minimum="50%"), bob=Quota())
    ann, bob = (core.open_namespace(qualified(who, "m"), PAGE) for who in ("ann", "bob"))
    fill(core, ann, "x", 4)
    fill(core, bob, "y", 40)
    assert present(core, ann, [key(f"x{number}") for number in range(4)]) == [key(f"x{number}") for number in range(4)]
    assert segments_of(core, "bob") == 2


def test_a_guaranteed_minimum_that_others_borrowed_comes_back() -> None:
    core = core_for(4, ann=Quota(minimum="75%"), bob=Quota())
    ann, bob = (core.open_namespace(qualified(who, "m"), PAGE) for who in ("ann", "bob"))
    fill(core, bob, "y", 8)
    assert segments_of(core, "bob") == 4
    for number in range(8):
        save(core, ann, [key(f"x{number}")])
        settle(core)
    assert segments_of(core, "ann") == 3
    assert segments_of(core, "bob") == 1
    assert wrong_core(core) == []


def test_memory_of_another_tenant_is_replaced_and_touched_before_it_is_used() -> None:
    core = core_for(2, ann=Quota(), bob=Quota())
    ann, bob = (core.open_namespace(qualified(who, "m"), PAGE) for who in ("ann", "bob"))
    fill(core, ann, "x", 4)
    reserved = core.writing.reserve(2, bob, bytes(16), [key("y")])
    assert outcomes(reserved) == [Outcome.NOT_TOUCHED]
    (assigned,) = reserved.assigned
    assert assigned.renewed
    assert core.segment_tenant(assigned.segment) == "bob"
    settle(core)
    again = core.writing.reserve(2, bob, bytes(16), [key("y")])
    assert outcomes(again) == [Outcome.GRANTED]
    assert again.assigned == []
    assert wrong_core(core) == []


def test_within_a_tenant_memory_changes_hands_as_it_is() -> None:
    core = core_for(4, ann=Quota())
    first, second = (core.open_namespace(qualified("ann", name), PAGE) for name in "mn")
    save(core, first, chain("x", 8))
    reserved = core.writing.reserve(1, second, bytes(16), [key("y")])
    assert outcomes(reserved) == [Outcome.GRANTED]
    assert [one.renewed for one in reserved.assigned] == [False]


def test_equal_names_of_two_tenants_are_two_namespaces() -> None:
    core = core_for(4, ann=Quota(), bob=Quota())
    ann, bob = (core.open_namespace(qualified(who, "m"), PAGE) for who in ("ann", "bob"))
    save(core, ann, [key("x")])
    assert ann != bob
    assert present(core, bob, [key("x")]) == []
    assert core.find_namespace("m") == -1


def test_a_cap_below_a_segment_is_refused_by_name() -> None:
    core = core_for(4, ann=Quota(cap="10%"))
    with pytest.raises(QuotaExceeded, match="less than a segment"):
        core.open_namespace(qualified("ann", "m"), PAGE)


def test_minima_that_do_not_fit_together_change_nothing() -> None:
    core = core_for(4, ann=Quota(cap="25%"))
    with pytest.raises(ConfigError, match=r"guaranteed minima come to .* but the pool has"):
        core.set_quotas({"ann": Quota("60%"), "bob": Quota("60%")})
    ann = core.open_namespace(qualified("ann", "m"), PAGE)
    fill(core, ann, "x", 8)
    assert segments_of(core, "ann") == 1


def test_what_is_above_a_smaller_cap_leaves_and_what_is_read_stays() -> None:
    core = core_for(4, ann=Quota())
    ann = core.open_namespace(qualified("ann", "m"), PAGE)
    fill(core, ann, "x", 8)
    leased = core.reading.lookup(1, ann, [key("x0")], lease=True)
    core.set_quotas({"ann": Quota(cap="25%")})
    for _ in range(8):
        core.reclaimer.shrink()
        settle(core)
    assert segments_of(core, "ann") == 1
    assert present(core, ann, [key("x0")]) == [key("x0")]
    core.reading.release(1, leased.lease)
    assert wrong_core(core) == []


def test_a_tenant_that_was_removed_keeps_nothing() -> None:
    core = core_for(4, ann=Quota(), bob=Quota())
    ann = core.open_namespace(qualified("ann", "m"), PAGE)
    fill(core, ann, "x", 8)
    core.set_quotas({"bob": Quota()})
    taken = [number for _ in range(5) for number in core.reclaimer.shrink()]
    assert sorted(taken) == [0, 1, 2, 3]
    assert present(core, ann, [key(f"x{number}") for number in range(8)]) == []
    assert wrong_core(core) == []


TENANTS = ("ann", "bob", "cat")
TOTAL = 6


class QuotaHistory(RuleBasedStateMachine):
    """Tenants store, read and leave; quotas change; memory is touched late."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.core = core_of(*[SLOTS] * TOTAL)
        self.numbers: dict[tuple[str, str], int] = {}
        self.leases: list[tuple[int, int]] = []
        self.now = 0.0
        self.serial = 0
        self.quotas: dict[str, Quota] = {}
        self.change(data)

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        parts = st.integers(0, TOTAL)
        minima = [data.draw(parts) for _ in TENANTS]
        while sum(minima) > TOTAL:
            minima[minima.index(max(minima))] -= 1
        self.quotas = {
            tenant: Quota(str(minimum * SEGMENT), str(max(data.draw(st.integers(1, TOTAL)), minimum) * SEGMENT))
            for tenant, minimum in zip(TENANTS, minima, strict=True)
        }
        self.core.set_quotas(self.quotas)
        self.give_back()

    def give_back(self) -> None:
        """What the node does in every round of its own."""
        for _ in range(2 * TOTAL):
            self.core.reclaimer.shrink()
            settle(self.core)

    @rule(tenant=st.sampled_from(TENANTS), name=st.sampled_from("mn"), count=st.integers(1, 6), again=st.booleans())
    def store(self, tenant: str, name: str, count: int, again: bool) -> None:
        number = self.core.open_namespace(qualified(tenant, name), PAGE)
        self.numbers[tenant, name] = number
        before = self.segments()
        self.serial += not again
        save(self.core, number, chain(f"{tenant}{self.serial % 5}", count))
        self.see(tenant, before)

    def segments(self) -> dict[str, int]:
        return {one: segments_of(self.core, one) for one in TENANTS}

    def see(self, storing: str, before: dict[str, int]) -> None:
        for tenant, count in self.segments().items():
            minimum = int(self.quotas[tenant].minimum) // SEGMENT
            if tenant != storing:
                assert count >= min(before[tenant], minimum), "a guaranteed minimum was taken"

    @rule(touch=st.booleans())
    def tick(self, touch: bool) -> None:
        self.now += 11.0
        if touch:
            settle(self.core)
        self.core.tick(self.now)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), number=st.integers(0, 4), length=st.integers(1, 4))
    def read(self, data: st.DataObject, number: int, length: int) -> None:
        tenant, name = data.draw(st.sampled_from(sorted(self.numbers)))
        found = self.core.reading.lookup(1, self.numbers[tenant, name], chain(f"{tenant}{number}", length), lease=True)
        if found.lease:
            self.leases.append((1, found.lease))
        for other in TENANTS:
            if other != tenant:
                keys = chain(f"{other}{number}", length)
                assert not self.core.reading.lookup(1, self.numbers[tenant, name], keys, lease=False).pages

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.core.reading.release(*self.leases.pop())
        self.give_back()

    @invariant()
    def the_brain_holds_together(self) -> None:
        assert wrong_core(self.core) == []

    @invariant()
    def caps_hold(self) -> None:
        leased = bool(self.leases)
        for tenant, count in self.segments().items():
            cap = int(self.quotas[tenant].cap) // SEGMENT
            assert count <= cap or leased, f"{tenant} has {count} segments of {cap}"

    @invariant()
    def memory_belongs_to_one_tenant(self) -> None:
        for segment in self.core.slots.segments:
            if segment.namespace is not None:
                assert segment.tenant == tenant_of(self.core.namespaces[segment.namespace].name)

    def teardown(self) -> None:
        for lease in self.leases:
            self.core.reading.release(*lease)
        assert wrong_core(self.core) == []


TestQuotaHistory = QuotaHistory.TestCase
TestQuotaHistory.settings = examples(60, stateful_step_count=25)
