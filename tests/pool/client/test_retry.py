"""A node that hangs is tried less and less often, one that is gone soon, and one that refuses seldom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import Unauthorised
from ems.pool.client.retry import MAX_RETRY_SECONDS, REFUSED_RETRY_SECONDS, RETRY_SECONDS, Retry


@given(st.integers(1, 40), st.floats(0, 1e6))
def test_with_a_node_that_hangs_the_pause_doubles_up_to_a_bound(failures: int, now: float) -> None:
    retry = Retry()
    assert retry.due(now)
    for failure in range(failures):
        retry.failed(now, hung=True)
        pause = min(RETRY_SECONDS * 2**failure, MAX_RETRY_SECONDS)
        assert not retry.due(now + pause * 0.99)
        now += pause * 1.01
        assert retry.due(now)
    retry.reached()
    retry.failed(now, hung=True)
    assert retry.due(now + RETRY_SECONDS * 1.01)


@given(st.lists(st.booleans(), max_size=20), st.floats(0, 1e6))
def test_a_node_that_is_not_there_is_tried_again_soon_however_often_it_failed(before: list[bool], now: float) -> None:
    """Its absence is seen at once, and who waits longer than needed says that a pool is ill that has come back."""
    retry = Retry()
    for hung in [*before, False]:
        retry.failed(now, hung=hung)
    assert not retry.due(now + RETRY_SECONDS * 0.99)
    assert retry.due(now + RETRY_SECONDS * 1.01)


def test_a_refusal_is_remembered() -> None:
    retry, refusal = Retry(), Unauthorised("who are you")
    retry.refused(10.0, refusal)
    assert retry.refusal is refusal
    assert not retry.due(10.0 + REFUSED_RETRY_SECONDS - 0.1)
    assert retry.due(10.0 + REFUSED_RETRY_SECONDS)


@pytest.mark.parametrize(
    "forgets", [lambda retry: retry.failed(50.0, hung=False), lambda retry: retry.reached()], ids=["gone", "reached"]
)
def test_anything_else_makes_a_refusal_forgotten(forgets: Callable[[Retry], None]) -> None:
    retry = Retry()
    retry.refused(10.0, Unauthorised("who are you"))
    forgets(retry)
    assert retry.refusal is None
