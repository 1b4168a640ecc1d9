"""How long a lookup waits: for nothing that costs more than it brings, and in the engine's queue for nothing less."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.vllm.waiting import (
    FIRST_PAUSE,
    GRACE_SECONDS,
    MOST_PAUSE,
    MOST_STEP_SECONDS,
    QUEUED_PAUSE,
    STEP_SECONDS,
    STEP_SHARE,
    StepWaits,
    Waiting,
)


@pytest.mark.parametrize(
    ("tokens", "pending", "expected", "waited", "limit", "waits"),
    [
        (40, False, 40, 0.0, 2.0, False),  # all there
        (50, False, 40, 0.0, 2.0, False),  # more than announced
        (10, True, 40, 1.9, 2.0, True),  # being written
        (10, True, 40, 2.0, 2.0, False),  # ... but not for ever
        (0, False, 40, GRACE_SECONDS / 2, 2.0, True),  # announced, perhaps about to be reserved
        (0, False, 40, GRACE_SECONDS, 2.0, False),  # announced, nothing to be seen
        (0, False, 40, 0.0, 0.0, False),
    ],
)
def test_a_handoff_waits_for_what_is_being_written(
    tokens: int, pending: bool, expected: int, waited: float, limit: float, waits: bool
) -> None:
    waiting = Waiting(0.0, expected)
    waiting.hurry(0.0)
    assert waiting.for_prefill(tokens, pending, limit, waited) is waits


@pytest.mark.parametrize(
    ("promoting", "waited", "limit", "computing", "waits"),
    [
        (100, 0.1, 0.8, 0.0, True),  # nobody knows what computing takes
        (100, 0.8, 0.8, 0.0, False),  # not for ever
        (100, 0.1, 0.8, 0.2, True),
        (100, 0.2, 0.8, 0.2, False),  # by now it could have been computed
        (0, 0.0, 0.8, 0.0, False),
        (100, 0.0, 0.0, 0.0, False),
    ],
)
def test_who_is_due_waits_for_what_comes_up_from_a_tier(
    promoting: int, waited: float, limit: float, computing: float, waits: bool
) -> None:
    waiting = Waiting(0.0, 0)
    waiting.hurry(0.0)
    assert waiting.for_tiers(0, promoting, computing / 100, limit, waited) is waits


def test_in_the_queue_a_request_waits_for_a_tier_however_long_that_takes() -> None:
    waiting = Waiting(0.0, 0)
    assert waiting.for_tiers(0, 100, 0.001, 0.8, 1000.0)
    waiting.hurry(1000.0)
    assert waiting.for_tiers(0, 100, 0.0, 0.8, 1000.7)
    assert not waiting.for_tiers(0, 100, 0.0, 0.8, 1000.81)


def test_who_is_due_does_not_wait_for_a_tier_that_was_slower_than_computing() -> None:
    for seconds, waits in ((1.9, True), (2.1, False)):
        waiting = Waiting(0.0, 0)
        waiting.for_tiers(0, 400, 0.001, 10.0, 0.0)
        waiting.hurry(seconds)
        assert waiting.for_tiers(200, 200, 0.01, 10.0, seconds) is waits


def test_who_is_due_waits_no_longer_than_what_comes_up_takes_to_be_computed() -> None:
    """What comes up counts, not all that is missing: the rest has to be computed in any case."""
    waiting = Waiting(0.0, 0)
    waiting.hurry(0.0)
    assert waiting.for_tiers(0, 100, 0.001, 10.0, 0.09)
    assert not waiting.for_tiers(0, 100, 0.001, 10.0, 0.11)


def test_without_a_limit_nobody_waits_for_tiers() -> None:
    assert not Waiting(0.0, 0).for_tiers(0, 100, 0.0, 0.0, 0.0)


def test_a_handoff_may_be_written_for_as_long_as_its_request_stands_in_the_queue() -> None:
    waiting = Waiting(0.0, 40)
    assert waiting.for_prefill(10, True, 2.0, 100.0)
    assert not waiting.for_prefill(10, False, 2.0, GRACE_SECONDS)
    waiting.hurry(100.0)
    assert waiting.for_prefill(10, True, 2.0, 101.9)
    assert not waiting.for_prefill(10, True, 2.0, 102.0)


def test_looks_grow_rarer_and_begin_anew_when_the_scheduler_asks() -> None:
    waiting = Waiting(0.0, 0)
    pauses = [waiting.pause() for _ in range(12)]
    assert (pauses[0], pauses[1], pauses[-1]) == (0.002, 0.004, QUEUED_PAUSE)
    waiting.hurry(1.0)
    pauses = [waiting.pause() for _ in range(40)]
    assert pauses[-1] == MOST_PAUSE
    begins = list(accumulate(pauses, initial=0.0))
    assert all(pause <= FIRST_PAUSE + begin / 10 + 1e-9 for begin, pause in zip(begins, pauses, strict=False))
    waiting.hurry(2.0)
    assert waiting.pause() == MOST_PAUSE


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 0.1),
    st.floats(0, 5),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20))),
)
def test_once_the_scheduler_asks_every_wait_is_bounded(
    tokens: int, promoting: int, token_seconds: float, limit: float, steps: list[tuple[float, int]]
) -> None:
    waiting, now = Waiting(0.0, 10), 0.0
    waiting.hurry(now)
    waiting.for_tiers(tokens, promoting, token_seconds, limit, now)
    for seconds, more in steps:
        now, tokens = now + seconds, tokens + more
        if now >= limit:
            assert not waiting.for_tiers(tokens, promoting, token_seconds, limit, now)
            assert not waiting.for_prefill(0, True, limit, now)
        if token_seconds and now >= token_seconds * promoting:
            assert not waiting.for_tiers(tokens, promoting, token_seconds, limit, now)


@given(st.floats(0, 1), st.floats(0, 1000), st.booleans())
def test_a_step_waits_little_beside_computing(age: float, computing: float, idle: bool) -> None:
    patience = StepWaits().patience(10.0, age, computing, idle=idle)
    if patience:
        little = age + patience <= computing * STEP_SHARE * 1.001
        assert little or (idle and patience <= STEP_SECONDS)
    least = STEP_SECONDS if idle else 0.0
    share = max(computing * STEP_SHARE, least)
    assert StepWaits().patience(0.0, 0.0, computing, idle=idle) == min(share, MOST_STEP_SECONDS)


Question = tuple[float, float, float, bool]
"""Seconds since the one before, seconds that computing takes, which part of its patience is waited, a new step."""


@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.floats(0, 100), st.floats(0, 1), st.booleans()), max_size=60),
    st.booleans(),
)
def test_an_engine_with_work_waits_a_twentieth_of_the_time(questions: list[Question], idle: bool) -> None:
    waits, now, total, in_step = StepWaits(), 0.0, 0.0, 0.0
    for passed, computing, part, new_step in questions:
        now += passed
        if new_step:
            waits.next_step()
            in_step = 0.0
        seconds = waits.patience(now, 0.0, computing, idle=idle) * part
        if seconds:
            waits.waited(now, now + seconds, idle=idle)
        now, total, in_step = now + seconds, total + seconds, in_step + seconds
        assert in_step <= MOST_STEP_SECONDS * 1.001
        assert idle or total <= now * STEP_SHARE + MOST_STEP_SECONDS * 1.001


def test_a_step_that_waited_goes_on_waiting_for_others() -> None:
    waits = StepWaits()
    waits.waited(0.0, 0.004, idle=False)
    assert waits.patience(0.004, 0.0, 1.0, idle=False) > 0
    waits.next_step()
    assert waits.patience(0.01, 0.0, 1.0, idle=False) == 0
    assert waits.patience(0.01, 0.0, 0.0, idle=True) == STEP_SECONDS
    assert waits.patience(0.004 / STEP_SHARE, 0.0, 1.0, idle=False) > 0
