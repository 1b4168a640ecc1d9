"""A tier that fails is cut out at once and comes back slowly, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.movement.gate import FIRST_PAUSE, GOOD_PROBES, MOST_PAUSE, Gate


def test_the_first_failure_cuts_it_out() -> None:
    assert Gate("reading").open
    gate = Gate("reading")
    assert gate.failed("no answer", 10.0)
    assert not gate.open
    assert gate.reason == "no answer"
    assert not gate.failed("again", 10.1), "it was cut out already"


def test_several_good_probes_bring_it_back() -> None:
    gate, now = Gate("reading"), 0.0
    gate.failed("x", now)
    for probe in range(GOOD_PROBES):
        assert not gate.probe_due(now)
        now += FIRST_PAUSE
        assert gate.probe_due(now)
        assert gate.probed("", now) == (probe == GOOD_PROBES - 1)
    assert gate.open
    assert gate.reason == ""


def test_a_bad_probe_begins_the_count_anew() -> None:
    gate = Gate("reading")
    gate.failed("x", 0.0)
    for _ in range(GOOD_PROBES - 1):
        gate.probed("", 1.0)
    gate.probed("still bad", 2.0)
    for _ in range(GOOD_PROBES - 1):
        assert not gate.probed("", 3.0)
    assert gate.probed("", 4.0)


@given(st.lists(st.booleans(), max_size=40))
def test_probes_grow_rarer_and_never_stop(results: list[bool]) -> None:
    gate, now, good = Gate("reading"), 0.0, 0
    gate.failed("x", now)
    for result in results:
        waited = 0.0
        while not gate.open and not gate.probe_due(now):
            now += 0.5
            waited += 0.5
        assert waited <= MOST_PAUSE
        good = good + 1 if result and not gate.open else 0
        came_back = gate.probed("" if result else "bad", now)
        assert came_back == (good == GOOD_PROBES)
        if came_back:
            good = 0
            gate.failed("once more", now)
