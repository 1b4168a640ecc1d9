"""The health gate in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.pool.client.health import HealthGate, HealthRules

GOOD, BAD, BROKEN = "a good check", "a failed check", "a failed operation"


def tell(gate: HealthGate, event: str, now: float) -> bool:
    """Whether the status changed."""
    return gate.passed(now) if event == GOOD else gate.failed(now, check=event == BAD)


def test_checks_are_due_every_ten_seconds() -> None:
    gate = HealthGate(HealthRules(), now=100.0)
    assert gate.next_check == 110.0
    tell(gate, GOOD, 110.5)
    assert gate.next_check == 120.5
    tell(gate, BROKEN, 113.0)
    assert gate.next_check == 120.5
    tell(gate, BAD, 121.0)
    assert gate.next_check == 131.0


@pytest.mark.parametrize("event", [BAD, BROKEN])
def test_the_first_failure_degrades_at_once(event: str) -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    assert tell(gate, event, 1.0)
    assert not gate.healthy
    assert not tell(gate, event, 1.0)


def test_three_good_checks_in_a_row_recover() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    tell(gate, BAD, 0.0)
    assert not tell(gate, GOOD, 10.0)
    assert not tell(gate, GOOD, 20.0)
    assert tell(gate, GOOD, 30.0)
    assert gate.healthy


@pytest.mark.parametrize("event", [BAD, BROKEN])
def test_a_failure_between_good_checks_starts_the_count_again(event: str) -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    tell(gate, BAD, 0.0)
    tell(gate, GOOD, 10.0)
    tell(gate, GOOD, 20.0)
    tell(gate, event, 25.0)
    tell(gate, GOOD, 30.0)
    assert not tell(gate, GOOD, 40.0)
    assert tell(gate, GOOD, 50.0)


def test_good_checks_before_a_degradation_do_not_count() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    for now in range(10, 100, 10):
        assert not tell(gate, GOOD, now)
    tell(gate, BAD, 100.0)
    assert not tell(gate, GOOD, 110.0)


def test_three_changes_in_a_minute_keep_it_degraded() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    tell(gate, BAD, 0.0)
    for now in (10.0, 20.0, 30.0):
        tell(gate, GOOD, now)
    assert gate.healthy
    tell(gate, BAD, 35.0)  # changes at 0, 30 and 35
    for now in (40.0, 50.0, 59.9):
        assert not tell(gate, GOOD, now)
    assert tell(gate, GOOD, 60.0)  # the first change is a minute old


@given(
    st.lists(
        st.tuples(st.sampled_from([GOOD, GOOD, GOOD, BAD, BROKEN]), st.floats(min_value=0, max_value=40)), max_size=80
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_it_never_breaks_its_rules(history: list[tuple[str, float]], good: int, flaps: int) -> None:
    rules = HealthRules(good_checks=good, flap_changes=flaps)
    gate = HealthGate(rules, now=0.0)
    now, healthy, in_a_row = 0.0, True, 0
    changes: list[float] = []
    for event, pause in history:
        now += pause
        changed = tell(gate, event, now)
        in_a_row = in_a_row + 1 if event == GOOD else 0
        recent = [change for change in changes if change > now - rules.flap_seconds]
        if event != GOOD:
            assert not gate.healthy
            assert changed == healthy
        elif not healthy:
            may_recover = in_a_row >= good and len(recent) < flaps
            assert gate.healthy == may_recover
            assert changed == may_recover
        else:
            assert gate.healthy
            assert not changed
        if gate.healthy != healthy:
            changes.append(now)
            healthy = gate.healthy


@pytest.mark.parametrize("wrong", [{"check_seconds": 0.0}, {"flap_seconds": -1.0}, {"good_checks": 0}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        HealthRules(**wrong)  # type: ignore[arg-type]
