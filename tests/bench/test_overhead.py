"""What the measurement of the connector's overhead says of its targets."""

from __future__ import annotations

import pytest

from benchmarks.comparison.overhead import Row
from benchmarks.comparison.pairs import compare


@pytest.mark.parametrize(
    ("others", "said"), [([1.005] * 9, "met"), ([1.02] * 9, "MISSED"), ([1.0] * 4 + [1.02] * 5, "open, more pairs")]
)
def test_a_ratio_is_met_missed_or_open(others: list[float], said: str) -> None:
    row = Row(what="cold", found=compare([(1.0, other) for other in others]), most_ratio=1.01)

    assert row.verdict() == said


@pytest.mark.parametrize(
    ("others", "said"), [([1.009] * 9, "met"), ([1.02] * 9, "MISSED"), ([1.0] * 4 + [1.02] * 5, "open, more pairs")]
)
def test_so_are_seconds_above(others: list[float], said: str) -> None:
    row = Row(what="pool", found=compare([(1.0, other) for other in others]), most_seconds=0.01)

    assert row.verdict() == said


def test_without_a_target_nothing_is_said() -> None:
    assert Row(what="own cache", found=compare([(1.0, 2.0)])).verdict() == ""
