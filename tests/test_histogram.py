from __future__ import annotations

from ems.histogram import Histogram


def test_values_are_put_into_the_first_bucket_that_holds_them() -> None:
    histogram = Histogram((0.005, 0.01, 300.0))
    for value in (0.0, 0.005, 0.005 + 1e-9, 1e9):
        histogram.observe(value)

    assert histogram.cumulative() == [("0.005", 2), ("0.01", 3), ("300.0", 3), ("+Inf", 4)]
    assert histogram.total == sum((0.0, 0.005, 0.005 + 1e-9, 1e9))
