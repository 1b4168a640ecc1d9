"""Explanations: each way that a request can go ends in one reason, and nothing is remembered longer than needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.reasons.words import Reason
from ems.vllm.reporting import explain
from ems.vllm.reporting.explain import Explanation, Explanations

Way = Callable[[Explanations], None]


def explained(way: Way, prompt: int = 100) -> Explanation:
    explanations = Explanations(16)
    explanations.arrived("r", prompt, wanted=True)
    way(explanations)
    explanation = explanations.ended("r")
    assert explanation is not None
    assert len(explanations._records) == 0
    return explanation


def whole_hit(explanations: Explanations) -> None:
    explanations.answered("r", 100)
    explanations.matched("r", 0, None)
    explanations.matched("r", 0, 100)
    explanations.loading("r", 100)


def partial_hit(explanations: Explanations) -> None:
    explanations.answered("r", 48)
    explanations.matched("r", 16, 32)
    explanations.loading("r", 32)


def gap(explanations: Explanations) -> None:
    explanations.answered("r", 48, Reason.GAP)
    explanations.matched("r", 0, 48)
    explanations.loading("r", 48)


def failed(explanations: Explanations) -> None:
    whole_hit(explanations)
    explanations.load_failed("r", 5)


def no_answer(explanations: Explanations) -> None:
    explanations.matched("r", 0, None)
    explanations.matched("r", 32, 0)


def pool_error(explanations: Explanations) -> None:
    explanations.answered("r", 0, Reason.LOOKUP_FAILED)
    explanations.matched("r", 0, 0)


def absent(explanations: Explanations) -> None:
    explanations.answered("r", 0)
    explanations.matched("r", 0, 0)


def engine_has_more(explanations: Explanations) -> None:
    explanations.answered("r", 32)
    explanations.matched("r", 64, 0)


def declined(explanations: Explanations) -> None:
    explanations.answered("r", 32)
    explanations.left_out("r", Reason.DEAR)


@pytest.mark.parametrize(
    ("way", "reason", "engine", "pool", "computed"),
    [
        (whole_hit, Reason.NOTHING_MISSED, 0, 100, 1),
        (partial_hit, Reason.ABSENT, 16, 32, 52),
        (gap, Reason.GAP, 0, 48, 52),
        (failed, Reason.LOAD_FAILED, 0, 20, 80),
        (no_answer, Reason.LOOKUP_TIMEOUT, 32, 0, 68),
        (pool_error, Reason.LOOKUP_FAILED, 0, 0, 100),
        (absent, Reason.ABSENT, 0, 0, 100),
        (engine_has_more, Reason.IN_ENGINE, 64, 0, 36),
        (declined, Reason.DEAR, 0, 0, 100),
        (lambda known: known.left_out("r", Reason.ADAPTER), Reason.ADAPTER, 0, 0, 100),
        (lambda known: known.matched("r", 0, None), Reason.NOT_LOADED, 0, 0, 100),
    ],
)
def test_a_request_is_explained(way: Way, reason: Reason, engine: int, pool: int, computed: int) -> None:
    explanation = explained(way)

    assert explanation.reason == reason.value
    assert explanation.sentence == reason.sentence
    assert (explanation.from_engine, explanation.from_pool, explanation.computed) == (engine, pool, computed)
    assert f"{pool} (" in explanation.line()
    assert explanation.line().endswith(reason.sentence)


def test_a_hit_names_its_blocks_and_its_tier() -> None:
    explanation = explained(whole_hit)

    assert (explanation.found, explanation.found_blocks, explanation.loaded_blocks) == (100, 6, 7)
    assert explanation.tier == "DRAM"
    assert explained(absent).tier == ""


def test_what_the_pool_knows_of_its_reason_is_told_with_it() -> None:
    def evicted(explanations: Explanations) -> None:
        explanations.answered("r", 48, Reason.EVICTED_FULL, "12 s ago")
        explanations.matched("r", 0, 48)
        explanations.loading("r", 48)

    explanation = explained(evicted)
    assert explanation.reason == "evicted_full"
    assert explanation.sentence == f"{Reason.EVICTED_FULL.sentence} (12 s ago)"


def test_what_the_pool_knows_does_not_stick_to_a_later_reason() -> None:
    def failed_then(explanations: Explanations) -> None:
        explanations.answered("r", 48, Reason.EVICTED_FULL, "12 s ago")
        explanations.left_out("r", Reason.DEAR)

    assert explained(failed_then).sentence == Reason.DEAR.sentence


def test_a_prompt_of_one_token_is_too_short() -> None:
    assert explained(lambda known: known.matched("r", 0, 0), prompt=1).reason == "too_short"


def test_every_reason_has_a_sentence() -> None:
    assert len({reason.sentence for reason in Reason}) == len(Reason)


def test_who_did_not_ask_gets_no_explanation_and_is_counted() -> None:
    explanations = Explanations(16)
    for number in range(3):
        explanations.arrived(f"{number}", 100)
    explanations.answered("0", 48)
    explanations.matched("0", 0, 48)
    explanations.loading("0", 48)
    explanations.answered("1", 0)
    explanations.matched("1", 20, 0)
    explanations.left_out("2", Reason.POOL_DOWN)

    assert [explanations.ended(f"{number}") for number in range(3)] == [None] * 3
    tally = explanations.take_tally()
    assert tally.decided == [(100, 48), (80, 0), (100, 0)]
    assert tally.misses == {"absent": 1, "pool_down": 1}
    assert explanations.take_tally().decided == []


def test_a_request_counts_once_however_often_it_is_looked_up() -> None:
    """A request that was preempted is looked up again."""
    explanations = Explanations(16)
    explanations.arrived("r", 100)
    for _ in range(3):
        explanations.answered("r", 48)
        explanations.matched("r", 0, 48)
        explanations.loading("r", 48)

    assert len(explanations.take_tally().decided) == 1


def test_requests_whose_end_nobody_tells_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_RECORDS", 10)
    explanations = Explanations(16)
    for number in range(100):
        explanations.arrived(f"{number}", 100, wanted=True)

    assert len(explanations._records) == 10
    assert explanations.ended("0") is None
    assert explanations.ended("99") is not None


_COUNTS = st.integers(0, 200)
_EVENTS = st.one_of(
    st.tuples(st.just("answered"), _COUNTS),
    st.tuples(st.just("matched"), _COUNTS, st.none() | _COUNTS),
    st.tuples(st.just("loading"), st.integers(1, 200)),
    st.tuples(st.just("load_failed"), _COUNTS),
    st.tuples(st.just("left_out"), st.sampled_from(Reason)),
)


@given(st.integers(1, 200), st.lists(_EVENTS, max_size=20))
def test_in_any_order_a_request_is_one_lookup_at_most_and_can_be_explained(
    prompt: int, events: list[tuple[object, ...]]
) -> None:
    explanations = Explanations(16)
    explanations.arrived("r", prompt, wanted=True)
    for name, *arguments in events:
        getattr(explanations, str(name))("r", *arguments)
    explanation = explanations.ended("r")

    assert explanation is not None
    assert explanation.computed >= 1
    assert len(explanations.take_tally().decided) <= 1
