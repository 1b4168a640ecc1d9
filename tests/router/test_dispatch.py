"""The course of one request: each branch, and any course at all."""

from __future__ import annotations

from typing import TypeGuard

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from ems.http.address import Address
from ems.router.choosing.chooser import Chooser
from ems.router.dispatch import DELAY_CAP, Dispatch, GiveUp, PassOn, Policy, Step, Try
from ems.router.fleet import Fleet, Instance, Role
from ems.router.metrics import Counters, Prefill
from ems.router.request import REQUEST_OVERHEAD, parse
from tests.router.soundness import unsound

REQUEST = parse(b'{"model":"m","prompt":"hello world, this is it"}')


def fleet_of(prefills: int, decodes: int) -> Fleet:
    fleet = Fleet()
    for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for port in range(1, count + 1):
            fleet.add(role, Address(role, port), 0.0, trusted=True)
    return fleet


def dispatch(
    fleet: Fleet, *, max_retries: int = 3, retry_delay: float = 0.001, prefill_above: int = 0, together: bool = False
) -> tuple[Dispatch, Counters]:
    counters = Counters()
    policy = Policy(max_retries, retry_delay, prefill_above, together=together)
    course = Dispatch(fleet, Chooser(), counters, REQUEST, REQUEST.prompt(), policy)
    return course, counters


def tries(step: Step | None, role: Role) -> TypeGuard[Try]:
    return isinstance(step, Try) and step.instance.role is role


def where(step: Step | None) -> Instance:
    assert isinstance(step, Try)
    return step.instance


def test_prefill_then_decode_with_their_loads() -> None:
    fleet = fleet_of(1, 1)
    [prefill], [decode] = fleet.listed(Role.PREFILL), fleet.listed(Role.DECODE)
    course, counters = dispatch(fleet)

    assert Try(prefill, 0.0) == course.start(0.0)
    assert (REQUEST.prompt_tokens + REQUEST_OVERHEAD, 0) == (prefill.load, decode.load)
    assert Try(decode, 0.0) == course.prefill_answered(200, 2.0)
    assert (0, REQUEST.decode_cost) == (prefill.load, decode.load)

    course.decode_started(200, 3.0)
    course.close()

    assert (prefill.load, decode.load) == (0, 0)
    assert counters.prefills == {Prefill.DONE: 1}
    assert (counters.prefill_time.total, counters.first_byte.total) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("params", "worked", "goes_on"),
    [
        (b'{"remote_block_ids":[1]}', True, False),
        (b'{"remote_block_ids":[1]}', False, True),
        (b'{"ems_stored_tokens":16}', True, True),
    ],
)
def test_blocks_that_a_decode_may_have_fetched_are_for_no_other(params: bytes, worked: bool, goes_on: bool) -> None:
    course, _ = dispatch(fleet_of(1, 2))
    course.start(0.0)
    course.prefill_answered(200, 0.0, Raw(params))
    assert course.handoff == Raw(params)
    course.decode_broke(0.0, worked=worked)

    assert (course.handoff is not None) is goes_on
    course.close()


def test_what_is_little_is_computed_by_decode_itself() -> None:
    fleet = fleet_of(1, 1)
    [decode] = fleet.listed(Role.DECODE)
    course, counters = dispatch(fleet, prefill_above=REQUEST.prompt_tokens + 1)

    assert Try(decode, 0.0) == course.start(0.0)
    assert counters.prefills == {Prefill.SPARED: 1}
    assert decode.queued == REQUEST.prompt_tokens

    course.decode_started(200, 1.0)

    assert (decode.queued, decode.load) == (0, REQUEST.decode_cost)

    course.close()
    course, _ = dispatch(fleet, prefill_above=REQUEST.prompt_tokens)

    assert tries(course.start(2.0), Role.PREFILL)


def test_a_decode_is_of_the_group_of_its_prefill_which_is_of_one_that_decodes() -> None:
    fleet = fleet_of(3, 2)
    for role, groups in ((Role.PREFILL, "abc"), (Role.DECODE, "ab")):
        for instance, group in zip(fleet.listed(role), groups, strict=True):
            fleet.belongs(role, instance.address, {"s": group})
    drawn: set[str] = set()
    for _ in range(6):
        course = Dispatch(fleet, Chooser(), Counters(), REQUEST, REQUEST.prompt(), Policy(0, 0.0, server="s"))
        prefill = where(course.start(0.0))
        decode = where(course.prefill_answered(200, 0.0))
        course.close()

        assert prefill.groups == decode.groups
        drawn.update(prefill.groups.values())
    assert drawn == {"a", "b"}

    while not fleet.failed(fleet.listed(Role.DECODE)[0], 0.0):
        pass
    course = Dispatch(fleet, Chooser(), Counters(), REQUEST, REQUEST.prompt(), Policy(0, 0.0, server="s"))

    assert where(course.start(0.0)).groups == {"s": "b"}
    course.close()
    course = Dispatch(fleet, Chooser(), Counters(), REQUEST, REQUEST.prompt(), Policy(0, 0.0, server="other"))

    assert isinstance(course.start(0.0), GiveUp), "an instance of another model server is none"


def test_a_prefill_that_breaks_is_retried_elsewhere_then_there_with_growing_delays() -> None:
    fleet = fleet_of(2, 1)
    course, counters = dispatch(fleet, retry_delay=0.5)
    steps = [course.start(0.0)]
    while tries(steps[-1], Role.PREFILL):
        steps.append(course.prefill_broke(0.0))

    one, two = fleet.listed(Role.PREFILL)

    assert [one, two, one, two] == [where(step) for step in steps[:-1]]
    assert [step.delay for step in steps[:-1] if tries(step, Role.PREFILL)] == [0.0, 0.5, 1.0, 2.0]
    assert tries(steps[-1], Role.DECODE)
    assert (counters.retries[Role.PREFILL], counters.prefills[Prefill.SKIPPED]) == (3, 1)


def test_a_prefill_that_answers_with_an_error_is_not_asked_again() -> None:
    fleet = fleet_of(2, 1)
    course, _ = dispatch(fleet)
    first = where(course.start(0.0))
    second = where(course.prefill_answered(500, 0.0))

    assert first is not second
    assert tries(course.prefill_answered(503, 0.0), Role.DECODE)


def test_the_clients_fault_ends_the_request_and_blames_nobody() -> None:
    fleet = fleet_of(1, 1)
    course, counters = dispatch(fleet)
    course.start(0.0)

    assert PassOn() == course.prefill_answered(400, 0.0)
    assert counters.prefills[Prefill.REFUSED] == 1
    assert not fleet.listed(Role.PREFILL)[0].failures
    assert not fleet.listed(Role.PREFILL)[0].load


def test_a_prefill_out_of_time_is_not_tried_elsewhere() -> None:
    fleet = fleet_of(3, 1)
    course, counters = dispatch(fleet)
    course.start(0.0)

    assert tries(course.prefill_timed_out(600.0), Role.DECODE)
    assert counters.prefills[Prefill.TIMED_OUT] == 1


def test_without_a_decode_nothing_is_begun() -> None:
    course, counters = dispatch(fleet_of(1, 0))

    assert GiveUp(1) == course.start(0.0)
    assert not counters.prefills


def test_decodes_that_all_break_are_given_up_after_the_retries() -> None:
    fleet = fleet_of(0, 2)
    course, counters = dispatch(fleet, max_retries=2)
    steps = [course.start(0.0)]
    while tries(steps[-1], Role.DECODE):
        steps.append(course.decode_broke(0.0))

    one, two = fleet.listed(Role.DECODE)

    assert [one, two, one] == [where(step) for step in steps[:-1]]
    assert GiveUp(1) == steps[-1]
    assert counters.retries[Role.DECODE] == 2
    assert unsound(fleet) == []
    assert not one.load + two.load


def test_no_retries_means_one_attempt() -> None:
    course, _ = dispatch(fleet_of(0, 2), max_retries=0)

    assert tries(course.start(0.0), Role.DECODE)
    assert isinstance(course.decode_broke(0.0), GiveUp)


def test_closing_at_any_time_releases_the_load() -> None:
    fleet = fleet_of(1, 1)
    for steps in range(3):
        course, _ = dispatch(fleet)
        course.start(0.0)
        if steps > 0:
            course.prefill_answered(200, 0.0)
        if steps > 1:
            course.decode_started(200, 0.0)
        course.close()
        course.close()

        assert not sum(one.load for role in Role for one in fleet.listed(role))


PREFILL_ENDS = st.one_of(st.integers(200, 599), st.just("broke"), st.just("late"))
DECODE_ENDS = st.one_of(st.integers(200, 599), st.just("broke"), st.just("cut"))


@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.tuples(PREFILL_ENDS, DECODE_ENDS, st.floats(0, 3)), min_size=60, max_size=60),
    st.floats(0, 100),
)
def test_every_course_ends_within_its_attempts_and_leaves_no_load(
    prefills: int, decodes: int, max_retries: int, ends: list[tuple[int | str, int | str, float]], retry_delay: float
) -> None:
    """Four requests one after another through one fleet, with whatever happens to them."""
    fleet = fleet_of(prefills, decodes)
    story = iter(ends)
    now = 0.0
    for _ in range(4):
        course, _ = dispatch(fleet, max_retries=max_retries, retry_delay=retry_delay)
        attempts = dict.fromkeys(Role, 0)
        step: Step | None = course.start(now)
        while isinstance(step, Try):
            attempts[step.instance.role] += 1

            assert step.instance.breaker.usable
            assert not step.instance.draining
            assert 0 <= step.delay <= DELAY_CAP
            assert sum(one.running for role in Role for one in fleet.listed(role)) == 1
            assert unsound(fleet) == []

            prefill_end, decode_end, seconds = next(story)
            now += seconds
            if tries(step, Role.PREFILL):
                if isinstance(prefill_end, int):
                    step = course.prefill_answered(prefill_end, now)
                else:
                    step = course.prefill_broke(now) if prefill_end == "broke" else course.prefill_timed_out(now)
            elif decode_end == "broke":
                step = course.decode_broke(now)
            else:
                course.decode_started(decode_end if isinstance(decode_end, int) else 200, now)
                if decode_end == "cut":
                    course.decode_cut(now)
                step = None
        course.close()

        assert max(attempts.values()) <= 1 + max_retries
        assert not sum(one.load + one.running for role in Role for one in fleet.listed(role))
        for instance in fleet.due_probes(now):
            instance.breaker.probe_failed(now)


# ------------------------------------------------------------------------------------------------------------ together


def test_a_pair_is_held_together_and_ends_each_for_itself() -> None:
    fleet = fleet_of(1, 1)
    [prefill], [decode] = fleet.listed(Role.PREFILL), fleet.listed(Role.DECODE)
    course, counters = dispatch(fleet, together=True, prefill_above=REQUEST.prompt_tokens + 1)

    assert Try(decode, 0.0, prefill=Try(prefill, 0.0)) == course.start(0.0)
    assert (prefill.load, decode.load) == (REQUEST.prompt_tokens + REQUEST_OVERHEAD, REQUEST.decode_cost)
    assert course.prefill_answered(200, 1.0) is None
    assert (prefill.load, decode.load) == (0, REQUEST.decode_cost)

    course.decode_started(200, 2.0)
    course.close()

    assert not prefill.load + decode.load
    assert counters.prefills == {Prefill.DONE: 1}


def test_either_ones_failure_leads_to_another_pair_and_blames_that_one_alone() -> None:
    fleet = fleet_of(2, 2)
    course, counters = dispatch(fleet, together=True, retry_delay=0.5)
    first = course.start(0.0)
    second = course.prefill_broke(0.0)
    third = course.decode_broke(0.0)
    fourth = course.prefill_answered(500, 0.0)
    (p1, d1), (p2, d2) = ((where(one.prefill), one.instance) for one in (first, second) if pairs_up(one))

    assert p1 is not p2
    assert d1 is not d2
    assert [one.delay for one in (first, second, third, fourth) if pairs_up(one)] == [0.0, 0.5, 1.0, 2.0]
    assert sum(one.failures for one in (p1, p2)) == 2
    assert (d1.failures, d2.failures) == (0, 1)
    assert GiveUp(1, Role.PREFILL) == course.prefill_broke(0.0)
    assert not sum(one.load for role in Role for one in fleet.listed(role))
    assert (counters.retries[Role.PREFILL], counters.retries[Role.DECODE]) == (3, 3)


def pairs_up(step: Step | None) -> TypeGuard[Try]:
    return isinstance(step, Try) and step.prefill is not None


def test_without_a_prefill_nothing_is_decoded_where_both_are_needed() -> None:
    for prefills, decodes, missing in ((0, 1, Role.PREFILL), (1, 0, Role.DECODE)):
        course, _ = dispatch(fleet_of(prefills, decodes), together=True)

        assert GiveUp(1, missing) == course.start(0.0)


def test_a_prefill_out_of_time_leaves_nothing_to_decode() -> None:
    course, counters = dispatch(fleet_of(2, 1), together=True)
    course.start(0.0)

    assert GiveUp(1, Role.PREFILL) == course.prefill_timed_out(600.0)
    assert counters.prefills[Prefill.TIMED_OUT] == 1


def test_no_other_pair_is_tried_for_an_answer_that_has_begun() -> None:
    fleet = fleet_of(2, 2)
    course, _ = dispatch(fleet, together=True)
    course.start(0.0)
    course.decode_started(200, 1.0)

    assert isinstance(course.prefill_broke(2.0), GiveUp)
    assert not sum(one.load for role in Role for one in fleet.listed(role))


def test_a_decode_that_says_it_failed_is_asked_for_its_health_not_put_aside() -> None:
    fleet = fleet_of(1, 1)
    [decode] = fleet.listed(Role.DECODE)
    course, _ = dispatch(fleet, together=True)
    course.start(0.0)
    for _ in range(3):
        assert pairs_up(course.decode_broke(0.0, answers=True))

    assert decode.breaker.usable
    assert decode.failures == 3


def test_a_pair_is_of_one_group_even_where_another_group_decodes() -> None:
    fleet = fleet_of(1, 2)
    for role, groups in ((Role.PREFILL, "a"), (Role.DECODE, "ab")):
        for instance, group in zip(fleet.listed(role), groups, strict=True):
            fleet.belongs(role, instance.address, {"s": group})
    course = Dispatch(
        fleet, Chooser(), Counters(), REQUEST, REQUEST.prompt(), Policy(9, 0.0, server="s", together=True)
    )
    step = course.start(0.0)
    while pairs_up(step):
        assert step.instance.groups == {"s": "a"}
        step = course.decode_broke(0.0)

    assert step == GiveUp(1, Role.PREFILL)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.lists(st.integers(0, 6), min_size=40, max_size=40))
def test_every_course_of_pairs_ends_within_its_attempts_and_leaves_no_load(
    prefills: int, decodes: int, max_retries: int, ends: list[int]
) -> None:
    fleet = fleet_of(prefills, decodes)
    story = iter(ends)
    course, _ = dispatch(fleet, max_retries=max_retries, together=True)
    step: Step | None = course.start(0.0)
    attempts = 0
    while pairs_up(step):
        attempts += 1

        assert sorted(one.running for role in Role for one in fleet.listed(role) if one.running) == [1, 1]
        assert unsound(fleet) == []

        end = next(story)
        if end == 2:
            assert course.prefill_answered(200, 0.0) is None
            end = 4  # only decode is left
        if end < 3:
            step = course.prefill_broke(0.0) if end else course.prefill_answered(503, 0.0)
        elif end == 3:
            step = course.prefill_answered(400, 0.0)
        elif end < 6:
            step = course.decode_broke(0.0, answers=end == 5)
        else:
            course.decode_started(200, 0.0)
            break
    course.close()

    assert attempts <= 1 + max_retries
    assert unsound(fleet) == []
    assert not sum(one.load + one.running for role in Role for one in fleet.listed(role))
