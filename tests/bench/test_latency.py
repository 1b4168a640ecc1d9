import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.bench.ttft_report import summarise


def test_known_samples() -> None:
    got = summarise([0.4, 0.1, 0.2, 0.3])

    assert (got.count, got.least, got.most) == (4, 0.1, 0.4)
    assert got.mean == pytest.approx(0.25)
    assert got.p50 == pytest.approx(0.25)
    assert got.p99 == pytest.approx(0.397)


def test_nothing_to_sum_up() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1))
def test_order_of_figures(samples: list[float]) -> None:
    got = summarise(samples)

    tolerance = 1e-9 * (1 + got.most)
    assert got.least <= got.p50 + tolerance
    assert got.p50 <= got.p99 + tolerance
    assert got.p99 <= got.most + tolerance
    assert got.least - tolerance <= got.mean <= got.most + tolerance
