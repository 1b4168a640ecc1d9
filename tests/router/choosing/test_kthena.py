"""Kthena's filters and scores: its own published vectors, and what its formulas give."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.router.choosing.kthena import FILTERS, SCORES, Asked, Measured, choose

ASKED = Asked()


def scores(name: str, *instances: Measured, asked: Asked = ASKED) -> list[int]:
    return SCORES[name](instances, asked, random.Random(0))


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        ([Measured(0), Measured(10), Measured(5)], [100, 0, 50]),
        ([Measured(5, 5), Measured(5, 0), Measured(0)], [99, 0, 100]),
        ([Measured(0), Measured(0)], [100, 100]),
    ],
)
def test_least_request(instances: list[Measured], expected: list[int]) -> None:
    assert expected == scores("least-request", *instances)


def test_least_latency_is_normalised_among_what_was_measured() -> None:
    fast, slow, new = Measured(ttft=1.0, tpot=0.1), Measured(ttft=3.0, tpot=0.3), Measured()
    mixed = Measured(ttft=1.0, tpot=0.3)

    assert scores("least-latency", fast, slow, mixed, new) == [100, 0, 50, 50]
    assert scores("least-latency", fast, slow, mixed, new, asked=Asked(latency_weight=0.9)) == [100, 0, 90, 50]
    assert scores("least-latency", fast, fast) == [100, 100], "no difference"
    assert scores("least-latency") == []


def test_gpu_usage_and_matches() -> None:
    assert scores("gpu-usage", Measured(kv_usage=0.25), Measured(kv_usage=1.0), Measured()) == [75, 0, 50]
    assert scores("kvcache-aware", Measured(matched=1 / 3), Measured(matched=1.0)) == [33, 100]
    many = [Measured(matched=share / 10) for share in range(8)]
    assert scores("prefix-cache", *many) == [0, 0, 0, 30, 40, 50, 60, 70], "the five best"
    assert scores("prefix-cache", Measured(), Measured()) == [0, 0]


def test_filters() -> None:
    assert [FILTERS["least-request"](Measured(waiting=count), ASKED) for count in (9, 10)] == [True, False]
    has, lacks = Measured(models=frozenset({"a"})), Measured(models=frozenset({"b"}))
    assert [FILTERS["lora-affinity"](one, Asked(model="a")) for one in (has, lacks)] == [True, False]
    assert FILTERS["lora-affinity"](lacks, Asked()), "the engine's own model is asked for"
    assert choose([Measured(waiting=10)], ASKED, ["least-request"], {"gpu-usage": 1}, random.Random(0)) is None


def test_weights_decide_and_a_weight_of_zero_does_not() -> None:
    idle, cached = Measured(0), Measured(5, 5, matched=1.0)

    def chosen(**weights: int) -> int | None:
        named = {name.replace("_", "-"): weight for name, weight in weights.items()}
        return choose([idle, cached], ASKED, [], named, random.Random(0))

    assert [
        chosen(least_request=1, prefix_cache=2),
        chosen(least_request=2, prefix_cache=1),
        chosen(least_request=1, prefix_cache=0),
    ] == [1, 0, 0]


def test_a_cold_prompt_finds_somebody_although_no_score_names_anybody() -> None:
    drawn = {
        choose([Measured(), Measured()], ASKED, [], {"kvcache-aware": 1}, random.Random(seed)) for seed in range(20)
    }

    assert drawn == {0, 1}


@given(
    st.lists(
        st.builds(
            Measured,
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(0, 20),
            st.none() | st.floats(0, 1),
            st.none() | st.floats(0, 100),
            st.none() | st.floats(0, 1),
            st.floats(0, 1),
        ),
        max_size=8,
    ),
    st.sampled_from(sorted(SCORES)),
    st.integers(),
)
def test_scores_are_of_0_to_100_and_the_same_again(instances: list[Measured], name: str, seed: int) -> None:
    given_scores = SCORES[name](instances, ASKED, random.Random(seed))

    assert len(given_scores) == len(instances)
    assert all(0 <= score <= 100 for score in given_scores)
    assert given_scores == SCORES[name](instances, ASKED, random.Random(seed))
    place = choose(instances, ASKED, ["least-request"], {name: 1}, random.Random(seed))
    assert place == choose(instances, ASKED, ["least-request"], {name: 1}, random.Random(seed))
    assert place is None or instances[place].waiting < ASKED.max_waiting
