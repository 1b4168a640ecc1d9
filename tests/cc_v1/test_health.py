"""The health gate in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.cc_v1.health import CheckFailed, CheckPassed, Degraded, HealthGate, HealthRules, OperationFailed, Recovered
from ems.errors import ConfigError

GOOD = CheckPassed()
BAD = CheckFailed("no answer")
BROKEN = OperationFailed("timed out")


def test_checks_are_due_every_ten_seconds() -> None:
    gate = HealthGate(HealthRules(), now=100.0)
    assert gate.next_check == 110.0
    gate.handle(GOOD, 110.5)
    assert gate.next_check == 120.5
    gate.handle(BROKEN, 113.0)
    assert gate.next_check == 120.5
    gate.handle(BAD, 121.0)
    assert gate.next_check == 131.0


@pytest.mark.parametrize("event", [BAD, BROKEN])
def test_the_first_failure_degrades_at_once(event: CheckFailed | OperationFailed) -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    assert gate.handle(event, 1.0) == [Degraded(event.reason)]
    assert not gate.healthy
    assert gate.handle(event, 1.0) == []


def test_three_good_checks_in_a_row_recover() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    gate.handle(BAD, 0.0)
    assert gate.handle(GOOD, 10.0) == []
    assert gate.handle(GOOD, 20.0) == []
    assert gate.handle(GOOD, 30.0) == [Recovered()]
    assert gate.healthy


@pytest.mark.parametrize("event", [BAD, BROKEN])
def test_a_failure_between_good_checks_starts_the_count_again(event: CheckFailed | OperationFailed) -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    gate.handle(BAD, 0.0)
    gate.handle(GOOD, 10.0)
    gate.handle(GOOD, 20.0)
    gate.handle(event, 25.0)
    gate.handle(GOOD, 30.0)
    assert gate.handle(GOOD, 40.0) == []
    assert gate.handle(GOOD, 50.0) == [Recovered()]


def test_good_checks_before_a_degradation_do_not_count() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    for now in range(10, 100, 10):
        assert gate.handle(GOOD, now) == []
    gate.handle(BAD, 100.0)
    assert gate.handle(GOOD, 110.0) == []


def test_three_changes_in_a_minute_keep_it_degraded() -> None:
    gate = HealthGate(HealthRules(), now=0.0)
    gate.handle(BAD, 0.0)
    for now in (10.0, 20.0, 30.0):
        gate.handle(GOOD, now)
    assert gate.healthy
    gate.handle(BAD, 35.0)  # changes at 0, 30 and 35
    for now in (40.0, 50.0, 59.9):
        assert gate.handle(GOOD, now) == []
    assert gate.handle(GOOD, 60.0) == [Recovered()]  # the first change is a minute old


@given(
    st.lists(
        st.tuples(st.sampled_from([GOOD, GOOD, GOOD, BAD, BROKEN]), st.floats(min_value=0, max_value=40)), max_size=80
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_it_never_breaks_its_rules(history: list[tuple[CheckPassed, float]], good: int, flaps: int) -> None:
    rules = HealthRules(good_checks=good, flap_changes=flaps)
    gate = HealthGate(rules, now=0.0)
    now, healthy, in_a_row = 0.0, True, 0
    changes: list[float] = []
    for event, pause in history:
        now += pause
        effects = gate.handle(event, now)
        in_a_row = in_a_row + 1 if event == GOOD else 0
        recent = [change for change in changes if change > now - rules.flap_seconds]
        if event != GOOD:
            assert not gate.healthy
            assert [type(effect) for effect in effects] == ([Degraded] if healthy else [])
        elif not healthy:
            may_recover = in_a_row >= good and len(recent) < flaps
            assert gate.healthy == may_recover
            assert effects == ([Recovered()] if may_recover else [])
        else:
            assert gate.healthy
            assert effects == []
        if gate.healthy != healthy:
            changes.append(now)
            healthy = gate.healthy


@pytest.mark.parametrize("wrong", [{"check_seconds": 0.0}, {"flap_seconds": -1.0}, {"good_checks": 0}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        HealthRules(**wrong)  # type: ignore[arg-type]
