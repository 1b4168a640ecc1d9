"""The circuit breaker in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.router.breaker import COOLDOWN, COOLDOWN_CAP, THRESHOLD, Breaker


def proven() -> Breaker:
    breaker = Breaker(0.0, trusted=True)
    breaker.probe_started()
    breaker.probe_passed()
    return breaker


def put_aside(now: float) -> Breaker:
    breaker = proven()
    for _ in range(THRESHOLD):
        breaker.failed(now)
    return breaker


def test_a_trusted_instance_may_be_used_before_its_first_probe_another_may_not() -> None:
    assert Breaker(0.0, trusted=True).usable
    assert not Breaker(0.0, trusted=False).usable
    assert Breaker(5.0, trusted=False).due(5.0)


def test_that_a_new_instance_does_not_answer_is_news_once() -> None:
    breaker = Breaker(0.0, trusted=False)
    said = []
    for now in (0.0, 1.0, 3.0):
        breaker.probe_started()
        said.append(breaker.probe_failed(now))
    assert said == [True, False, False]


def test_failures_in_a_row_put_an_instance_aside() -> None:
    breaker = proven()

    assert [breaker.failed(1.0) for _ in range(THRESHOLD)] == [False] * (THRESHOLD - 1) + [True]
    assert not breaker.usable


def test_a_success_between_failures_forgives_them() -> None:
    breaker = proven()
    for _ in range(10):
        for _ in range(THRESHOLD - 1):
            breaker.failed(1.0)
        breaker.succeeded()

    assert breaker.usable
    assert not breaker.doubted


def test_an_instance_that_was_put_aside_waits_for_its_cooldown_and_a_probe() -> None:
    breaker = put_aside(10.0)

    assert not breaker.due(10.0 + COOLDOWN - 0.001)
    assert breaker.due(10.0 + COOLDOWN)

    breaker.probe_started()

    assert not breaker.usable
    assert not breaker.due(99.0), "one probe at a time"
    assert breaker.probe_passed()
    assert breaker.usable


def test_failed_probes_lengthen_the_cooldown_up_to_its_cap() -> None:
    breaker = put_aside(0.0)
    now, waits = 0.0, []
    for _ in range(5):
        assert breaker.probe_at is not None
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probe_started()
        breaker.probe_failed(now)

    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert waits[-1] == COOLDOWN_CAP


def test_after_a_passed_probe_one_failure_is_enough_until_a_request_works() -> None:
    breaker = put_aside(0.0)
    breaker.probe_started()
    breaker.probe_passed()

    assert breaker.failed(5.0)
    assert breaker.probe_at == 5.0 + 2 * COOLDOWN, "and the cooldown goes on growing"

    breaker.probe_started()
    breaker.probe_passed()
    breaker.succeeded()

    assert not breaker.failed(9.0)
    assert breaker.cooldown == COOLDOWN


def test_a_request_that_began_before_cannot_bring_an_instance_back() -> None:
    breaker = put_aside(0.0)
    breaker.succeeded()

    assert not breaker.usable


def test_a_probe_that_began_before_cannot_bring_an_instance_back() -> None:
    breaker = proven()
    breaker.suspect(0.0)
    breaker.probe_started()
    for _ in range(THRESHOLD):
        breaker.failed(1.0)

    assert not breaker.probe_passed()
    assert not breaker.usable
    assert breaker.probe_at == 1.0 + COOLDOWN


def test_a_failed_probe_that_began_before_does_not_punish_twice() -> None:
    breaker = proven()
    breaker.probe_started()
    for _ in range(THRESHOLD):
        breaker.failed(1.0)

    assert not breaker.probe_failed(1.5)
    assert breaker.probe_at == 1.0 + COOLDOWN


def test_server_errors_raise_doubt_and_a_probe_decides() -> None:
    breaker = proven()
    for _ in range(10):
        breaker.suspect(1.0)

    assert breaker.usable
    assert breaker.doubted
    assert breaker.due(1.0 + COOLDOWN)

    breaker.probe_started()
    breaker.probe_passed()

    assert breaker.usable
    assert not breaker.doubted


def test_a_doubted_instance_whose_probe_fails_is_put_aside() -> None:
    breaker = proven()
    breaker.suspect(2.0)
    breaker.probe_started()

    assert breaker.probe_failed(3.0)
    assert not breaker.usable


EVENTS = st.lists(
    st.tuples(st.sampled_from(["failed", "succeeded", "suspect", "probe", "passed", "broken"]), st.floats(0, 3)),
    max_size=60,
)


@given(EVENTS, st.booleans())
def test_whatever_happens_nothing_is_used_between_cooldown_and_probe(  # noqa: C901  one branch an event
    events: list[tuple[str, float]], trusted: bool
) -> None:
    """And an instance that is put aside always has a probe ahead of it, so none is lost for ever."""
    breaker = Breaker(0.0, trusted=trusted)
    now = 0.0
    probe_began = None
    aside_since: float | None = None if trusted else -COOLDOWN
    for event, wait in events:
        now += wait
        was_usable = breaker.usable
        if event == "failed":
            breaker.failed(now)
        elif event == "succeeded":
            breaker.succeeded()
        elif event == "suspect":
            breaker.suspect(now)
        elif event == "probe" and breaker.due(now):
            breaker.probe_started()
            probe_began = now
        elif event == "passed" and breaker.probing:
            breaker.probe_passed()
        elif event == "broken" and breaker.probing:
            breaker.probe_failed(now)
        if was_usable and not breaker.usable:
            aside_since = now
        if breaker.usable and not was_usable:
            assert event == "passed"
            assert probe_began is not None
            assert aside_since is not None
            assert probe_began >= aside_since + COOLDOWN
        if not breaker.usable:
            assert breaker.probing or breaker.probe_at is not None
            assert not breaker.proven
        if breaker.doubted:
            assert breaker.probing or breaker.probe_at is not None
