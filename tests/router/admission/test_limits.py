from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.kthena.rate_limit import RateLimit, Unit
from ems.router.admission.limits import Exceeded, Kind, Limited, Limits, Taken

MINUTE = RateLimit(input_tokens_per_unit=60, output_tokens_per_unit=120, unit=Unit.MINUTE)


def taken(limits: Limits, tokens: int, now: float = 0.0, *limited: Limited) -> Taken:
    got = limits.take(limited or [("route/m", MINUTE)], tokens, now)
    assert not isinstance(got, Exceeded)
    return got


def exceeded(limits: Limits, tokens: int, now: float = 0.0, *limited: Limited) -> Exceeded:
    got = limits.take(limited or [("route/m", MINUTE)], tokens, now)
    assert isinstance(got, Exceeded)
    return got


def test_is_read_as_kthena_writes_it() -> None:
    text = b'{"inputTokensPerUnit": 10, "unit": "hour"}'

    assert msgspec.json.decode(text, type=RateLimit) == RateLimit(input_tokens_per_unit=10, unit=Unit.HOUR)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"inputTokensPerUnit": 0}', b'{"inputTokensPerUnit": 1, "unit": "week"}', b'{"requests": 1}']
)
def test_refuses_what_is_no_limit(text: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, ConfigError)):
        msgspec.json.decode(text, type=RateLimit)


def test_prompts_are_taken_up_front_and_refill_evenly() -> None:
    limits = Limits()
    taken(limits, 50)

    assert exceeded(limits, 20) == Exceeded("route/m", Kind.INPUT, 60, 10)
    taken(limits, 20, 10.0)


def test_a_prompt_above_the_limit_is_always_refused() -> None:
    small = RateLimit(input_tokens_per_unit=5)

    assert exceeded(Limits(), 61) == Exceeded("route/m", Kind.INPUT, 60, None)
    assert exceeded(Limits(), 61, 0.0, ("route/m", MINUTE), ("key/a", small)).most == 5


def test_answers_are_taken_at_their_end_however_long_they_are() -> None:
    limits = Limits()
    taken(limits, 1).settle(240, 0.0)

    assert exceeded(limits, 1, 59.0) == Exceeded("route/m", Kind.OUTPUT, 120, 2)
    taken(limits, 1, 61.0)


def test_what_failed_costs_nothing_and_is_given_back_once() -> None:
    limits = Limits()
    first = taken(limits, 40)
    taken(limits, 20)
    first.give_back(0.0)
    first.give_back(0.0)
    first.settle(500, 0.0)

    assert limits.left(0.0) == {("route/m", Kind.INPUT): 40.0, ("route/m", Kind.OUTPUT): 120.0}


def test_takes_from_all_or_none() -> None:
    limits = Limits()
    small = RateLimit(input_tokens_per_unit=5)

    taken(limits, 3, 0.0, ("router", MINUTE), ("key/a", small))
    assert exceeded(limits, 4, 0.0, ("router", MINUTE), ("key/a", small)).scope == "key/a"
    assert limits.left(0.0)["router", Kind.INPUT] == 57


def test_a_limit_that_is_removed_limits_nothing_and_scopes_are_apart() -> None:
    limits = Limits()
    taken(limits, 60)
    exceeded(limits, 1)
    taken(limits, 60, 0.0, ("route/other", MINUTE))

    assert not isinstance(limits.take([], 1000, 0.0), Exceeded)


def test_a_changed_limit_keeps_the_share_that_is_left() -> None:
    limits = Limits()
    taken(limits, 30)
    larger = RateLimit(input_tokens_per_unit=600, unit=Unit.MINUTE)
    taken(limits, 300, 0.0, ("route/m", larger))

    assert exceeded(limits, 1, 0.0, ("route/m", larger)).retry_after == 1


@pytest.mark.slow
def test_memory_is_bounded_and_forgets_full_buckets_first() -> None:
    limits = Limits()
    for number in range(Limits.MOST_BUCKETS + 10):
        taken(limits, 1, float(number), (f"key/{number}", RateLimit(input_tokens_per_unit=1)))

    assert len(limits.left(1e9)) <= Limits.MOST_BUCKETS


@given(
    st.lists(
        st.tuples(
            st.floats(0, 30), st.sampled_from(["take", "settle", "back"]), st.integers(0, 70), st.sampled_from("ab")
        ),
        max_size=60,
    )
)
def test_histories_end_full_and_never_allow_more_than_the_limit(events: list[tuple[float, str, int, str]]) -> None:
    limits = Limits()
    now = 0.0
    running: list[tuple[str, int, Taken]] = []
    used = {"a": 0, "b": 0}
    for later, what, tokens, scope in events:
        now += later
        if what == "take":
            got = limits.take([(scope, MINUTE)], tokens, now)
            if not isinstance(got, Exceeded):
                used[scope] += tokens
                running.append((scope, tokens, got))
        elif running:
            name, took, one = running.pop()
            if what == "settle":
                one.settle(tokens, now)
            else:
                one.give_back(now)
                used[name] -= took
        for name, total in used.items():
            assert total <= 60 + now + 1e-3, name
    for _, _, one in running:
        one.give_back(now)
    assert all(left in (60.0, 120.0) for left in limits.left(now + 1e6).values())
