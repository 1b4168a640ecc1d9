"""The summary line in virtual time."""

from __future__ import annotations

from ems.transfers.summary import Kind, Sample, Summary


def test_one_line_has_everything() -> None:
    summary = Summary(30.0, now=0.0)
    summary.add(Sample(Kind.LOOKUP, 6, 8, 0.001))
    summary.add(Sample(Kind.LOOKUP, 0, 2, 0.001))
    summary.add(Sample(Kind.LOAD, 4, 4, 0.010))
    summary.add(Sample(Kind.LOAD, 1, 2, 0.002))
    summary.add(Sample(Kind.SAVE, 3, 3, 0.0125))
    assert summary.line(29.9) is None
    assert summary.line(30.0) == (
        "loads 2 (blocks 2.5/1/4, ms 6.0/2.0/10.0), saves 1 (blocks 3.0/3/3, ms 12.5/12.5/12.5), "
        "lookups 2, hit rate 60.0% (6 of 10 blocks)"
    )


def test_each_line_begins_anew_and_idle_intervals_have_none() -> None:
    summary = Summary(30.0, now=0.0)
    summary.add(Sample(Kind.LOAD, 1, 1, 0.001))
    assert summary.line(31.0) is not None
    assert summary.next_line == 61.0
    assert summary.line(61.0) is None
    assert summary.next_line == 91.0
    summary.add(Sample(Kind.SAVE, 2, 2, 0.001))
    assert summary.line(91.0) == "loads 0, saves 1 (blocks 2.0/2/2, ms 1.0/1.0/1.0), lookups 0"
