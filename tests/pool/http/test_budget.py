"""Connections that the HTTP server has, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.http.budget import EXCHANGE_SECONDS, ConnectionBudget
from ems.pool.node.client_limits import MAX_HTTP

STEPS = st.lists(st.tuples(st.sampled_from(["waits", "ended", "looked"]), st.integers(0, 60), st.floats(0, 4)))


@given(STEPS)
def test_there_are_never_too_many_and_none_for_too_long(steps: list[tuple[str, int, float]]) -> None:
    budget: ConnectionBudget[int] = ConnectionBudget()
    since: dict[int, float] = {}
    now = 0.0
    for step, name, seconds in steps:
        now += seconds
        if step == "waits":
            gone = budget.waits(name, now)
            since[name] = now
            assert all(since[one] == min(since.values()) for one in gone), "somebody else had waited longer"
        elif step == "ended":
            budget.ended(name)
            gone = [name]
        else:
            gone = budget.overdue(now)
            assert set(gone) == {one for one, at in since.items() if now - at >= EXCHANGE_SECONDS}
        for one in gone:
            since.pop(one, None)
        assert len(budget) == len(since) <= MAX_HTTP


def test_who_waited_longest_goes_for_who_comes() -> None:
    budget: ConnectionBudget[int] = ConnectionBudget()
    for name in range(MAX_HTTP):
        assert budget.waits(name, 0.0) == []
    assert budget.waits(0, 1.0) == []
    assert budget.waits(99, 1.0) == [1]
