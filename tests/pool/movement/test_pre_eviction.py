"""What leaves soon is offered whole, not only who is first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.movement import write_back as module
from ems.pool.movement.write_back import PreEvictionWalk
from ems.pool.pages import Page


def pages(count: int) -> list[Page]:
    made = []
    for number in range(count):
        page = Page(number.to_bytes(16, "big"), number.to_bytes(20, "big"))
        page.present = True
        made.append(page)
    return made


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_page_comes_before_any_comes_twice(count: int, most: int) -> None:
    order, walk = pages(count), PreEvictionWalk()
    seen: list[Page] = []
    while len(seen) < count:
        some = walk.next(1, order, most)
        assert 0 < len(some) <= most
        seen += some
    assert seen == order
    assert walk.next(1, order, most) == order[:most], "and again"


def test_namespaces_walk_by_themselves() -> None:
    order, other, walk = pages(4), pages(4), PreEvictionWalk()
    assert walk.next(1, order, 3) == order[:3]
    assert walk.next(2, other, 2) == other[:2]
    assert walk.next(1, order, 3) == order[3:]


def test_what_was_refused_or_left_does_not_come() -> None:
    order, walk = pages(4), PreEvictionWalk()
    walk.refused([order[1].ref])
    order[2].present = False
    assert walk.next(1, order, 4) == [order[0], order[3]]


def test_no_more_refusals_are_kept_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REFUSED", 2)
    order, walk = pages(3), PreEvictionWalk()
    walk.refused(page.ref for page in order)
    assert walk.next(1, order, 3) == order[:1]
