"""When workers that ended are followed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.router.workers.restarts import LONGEST_DELAY, PROVEN, Restarts

pytestmark = pytest.mark.hypothesis


def test_each_repetition_waits_for_twice_as_long() -> None:
    restarts = Restarts(2)

    assert [restarts.delay(1, 0.0) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, LONGEST_DELAY, LONGEST_DELAY]
    assert restarts.delay(0, 0.0) == 0.0
    assert restarts.delay(1, PROVEN + 1) == 0.0
    assert restarts.delay(1, PROVEN) == 1.0


def test_a_worker_that_never_lasts_is_followed_for_ever() -> None:
    restarts = Restarts(1)

    assert {restarts.delay(0, 1.0) for _ in range(5000)} == {0.0, 1.0, 2.0, 4.0, 8.0, LONGEST_DELAY}


@given(st.lists(st.floats(0, 1e6), max_size=100))
def test_no_worker_is_followed_late(lives: list[float]) -> None:
    restarts = Restarts(1)

    for lasted in lives:
        delay = restarts.delay(0, lasted)
        assert 0.0 <= delay <= LONGEST_DELAY
        assert lasted <= PROVEN or not delay
