"""What leaves soon is offered whole, not only who is first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


def test_what_left_does_not_come() -> None:
    order, walk = pages(4), PreEvictionWalk()
    order[2].present = False
    assert walk.next(1, order, 4) == [order[0], order[1], order[3]]


def test_what_is_settled_comes_again_when_it_was_used() -> None:
    order, walk = pages(4), PreEvictionWalk()
    walk.next(1, order, 4)
    walk.settled(1, [(order[0].ref, order[0].used), (order[1].ref, order[1].used)])
    for _ in range(3):
        assert walk.next(1, order, 4) == order[2:]
    order[1].used += 1.0
    assert walk.next(1, order, 4) == order[1:]


def test_what_is_settled_before_its_next_walk_comes_to_it_does_not_come() -> None:
    order, walk = pages(4), PreEvictionWalk()
    walk.next(1, order, 4)
    assert walk.next(1, order, 2) == order[:2]
    walk.settled(1, [(page.ref, page.used) for page in order])
    assert walk.next(1, order, 2) == []
    assert walk.next(1, order, 4) == []


def test_what_stood_elsewhere_for_a_walk_is_forgotten() -> None:
    order, walk = pages(2), PreEvictionWalk()
    walk.next(1, order, 2)
    walk.settled(1, [(page.ref, page.used) for page in order])
    assert walk.next(1, order[:1], 2) == []
    assert walk.next(1, order, 2) == order[1:]


@given(st.lists(st.lists(st.integers(0, 19), max_size=20, unique=True), max_size=20), st.integers(1, 9))
def test_no_more_is_kept_than_two_walks_came_to(orders: list[list[int]], most: int) -> None:
    known, walk = pages(20), PreEvictionWalk()
    for order in orders:
        walk.next(1, [known[number] for number in order], most)
        walk.settled(1, [(page.ref, page.used) for page in known])
        kept = walk._walks[1]
        assert len(kept.settled) + len(kept.before) <= 2 * max(len(one) for one in orders)
