"""What engines say of themselves: pages as they come, what follows from two of them, and how long it counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.router.choosing.figures import FRESH, Figures
from ems.router.choosing.kthena import METRICS, Measured
from tests.engines.engine_pages import vllm

UNKNOWN = Measured(3, 3, 0, None, None, None, 0.5)


def said(figures: Figures, now: float) -> Measured:
    return figures.measured(3, 0.5, now)


@pytest.mark.parametrize(
    "page",
    [b"", b"<html>", b"vllm:x 1", *(b"vllm:num_requests_running " + one for one in (b"NaN", b"-1", b"1e99", b"a"))],
)
def test_a_page_that_makes_no_sense_changes_nothing(page: bytes) -> None:
    figures = Figures()
    figures.take(METRICS, vllm(running=5, kv_usage=0.5), 0.0)
    before = said(figures, 1.0)

    with pytest.raises(ValueError, match=r"it has no figures|its num_requests_running is|could not convert"):
        figures.take(METRICS, page, 1.0)
    assert said(figures, 1.0) == before


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\n", b"vllm:num_requests_running", b"{", b"} ", b" 1"])))
def test_any_page_is_read_or_refused(pieces: list[bytes]) -> None:
    page = b"".join(pieces)
    for path in (METRICS, b"/v1/models"):
        figures = Figures()
        try:
            figures.take(path, page, 0.0)
        except ValueError:
            assert said(figures, 0.0) == UNKNOWN
        else:
            assert said(figures, 0.0) != UNKNOWN


def test_latencies_are_means_of_what_came_between_two_pages() -> None:
    figures = Figures()
    figures.take(METRICS, vllm(ttft=(8, 4), tpot=(0.0, 0)), 0.0)
    assert (said(figures, 0.0).ttft, said(figures, 0.0).tpot) == (2.0, None), "before: the mean since the engine began"
    figures.take(METRICS, vllm(ttft=(9, 6), tpot=(1, 10)), 1.0)
    assert (said(figures, 1.0).ttft, said(figures, 1.0).tpot) == (0.5, 0.1)
    figures.take(METRICS, vllm(ttft=(9, 6), tpot=(3, 20)), 2.0)
    assert (said(figures, 2.0).ttft, said(figures, 2.0).tpot) == (0.5, 0.2), "nothing new leaves it as it was"
    figures.take(METRICS, vllm(ttft=(3, 1), tpot=(0, 0)), 3.0)
    assert (said(figures, 3.0).ttft, said(figures, 3.0).tpot) == (3.0, None), "the engine began anew"


def test_what_was_said_counts_for_a_time() -> None:
    figures = Figures()
    assert said(figures, 0.0) == UNKNOWN
    figures.take(METRICS, vllm(running=1, waiting=4, kv_usage=0.5, ttft=(1, 1)), 5.0)
    figures.take(b"/v1/models", b'{"data": [{"id": "m"}, {"id": "fine"}]}', 7.0)

    assert said(figures, 5.0 + FRESH) == Measured(3, 1, 4, 0.5, 1.0, None, 0.5, frozenset({"m", "fine"}))
    assert said(figures, 5.1 + FRESH) == UNKNOWN._replace(models=frozenset({"m", "fine"}))
    assert said(figures, 7.1 + FRESH) == UNKNOWN
    figures.take(METRICS, vllm(kv_usage=0.5, ttft=(1, 1)), 9.0 + FRESH)
    assert said(figures, 9.0 + FRESH).ttft == 1.0, "nothing is left of what was said long ago"
