"""What is offered again leaves room in the queue for what is saved meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ems.pool.movement.hottest import HottestPages
from ems.pool.movement.write_back import Unit, WriteBackQueue
from ems.pool.pages import Page
from ems.pool.tiers.offering_again import OfferingAgain

LIMIT = 100


def offered(size: int, queued: int = 0) -> int:
    """How many of twenty pages of ``size`` bytes are offered in one go, beside ``queued`` bytes that wait already."""
    queue = WriteBackQueue(LIMIT, LIMIT)
    if queued:
        queue.add(Unit(0, 1, (bytes(16),), queued, 0.0))
    pages = [Page(number.to_bytes(16, "big"), bytes(8)) for number in range(1, 21)]
    for page in pages:
        page.present = True
    hottest = HottestPages([(0, size, pages)], 20 * size)
    while hottest.step(100):
        pass
    state: Any = SimpleNamespace(tier=None, write_back=queue)
    again = OfferingAgain(state, SimpleNamespace(), lambda *_: None)  # type: ignore[arg-type]
    return len(again._taken(hottest))


@pytest.mark.parametrize(
    ("size", "queued", "count"),
    [(10, 0, 5), (10, 20, 3), (10, 50, 0), (10, 90, 0), (60, 0, 1), (60, 1, 0), (100, 0, 1), (101, 0, 1), (101, 1, 0)],
)
def test_half_of_the_queue_is_left_to_what_is_saved(size: int, queued: int, count: int) -> None:
    assert offered(size, queued) == count
