import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.comparison.pairs import compare

TIMES = st.floats(min_value=1e-6, max_value=1e3)


def test_known_pairs() -> None:
    got = compare([(1.0, 1.1), (2.0, 2.0), (4.0, 5.2)])

    assert (got.pairs, got.base, got.other) == (3, 2.0, 2.0)
    assert got.ratio == pytest.approx(1.1)
    assert got.difference == pytest.approx(0.1)
    assert got.ratio_low == pytest.approx(1.0)
    assert got.ratio_high == pytest.approx(1.3)
    assert got.difference_low == pytest.approx(0.0)
    assert got.difference_high == pytest.approx(1.2)


def test_what_slows_both_of_a_pair_down_does_not_count() -> None:
    source = random.Random(1)
    loads = [source.uniform(1, 10) for _ in range(101)]

    assert compare([(load, 1.05 * load) for load in loads]).ratio == pytest.approx(1.05)


def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    source = random.Random(2)
    rounds = [compare([(1.0, source.lognormvariate(0, 0.3)) for _ in range(40)]) for _ in range(400)]
    held = sum(one.ratio_low <= 1.0 <= one.ratio_high for one in rounds)

    assert 0.92 <= held / len(rounds) <= 0.99


def test_more_pairs_say_more() -> None:
    source = random.Random(3)
    few, many = ([(1.0, source.lognormvariate(0, 0.3)) for _ in range(count)] for count in (20, 2000))

    assert compare(many).ratio_high - compare(many).ratio_low < compare(few).ratio_high - compare(few).ratio_low


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1))
def test_the_median_lies_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    got = compare(pairs)

    assert got.ratio_low <= got.ratio * (1 + 1e-9)
    assert got.ratio <= got.ratio_high * (1 + 1e-9)


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        compare([])
    with pytest.raises(ValueError, match="not above zero"):
        compare([(1.0, 1.0), (0.0, 1.0)])
