"""What is offered once more: the hottest pages, as many as are lent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.movement.hottest import HottestPages
from ems.pool.pages import Page


def a_page(number: int, used: float, *, present: bool = True) -> Page:
    made = Page(number.to_bytes(16, "big"), bytes(8))
    made.used, made.present = used, present
    return made


def taken(walk: HottestPages, most: int = 3, room: int = 1 << 40) -> list[tuple[int, Page]]:
    while walk.step(2):
        pass
    found = []
    while part := walk.take(most, room):
        assert len(part) <= most
        found += part
    return found


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=3), st.integers(0, 40))
def test_the_hottest_that_fit_come_in_their_order(spaces: list[list[int]], room: int) -> None:
    pages = [[a_page(number, used) for number, used in enumerate(space)] for space in spaces]
    found = taken(HottestPages([(number, number + 1, space) for number, space in enumerate(pages)], room))

    ages = [page.used for _, page in found]
    assert ages == sorted(ages, reverse=True)
    assert sum(namespace + 1 for namespace, _ in found) <= room
    left = [page.used for number, space in enumerate(pages) for page in space if (number, page) not in found]
    largest = len(spaces)
    if left and found and sum(namespace + 1 for namespace, _ in found) + largest <= room:
        raise AssertionError("there was room for one more")
    assert not left or not ages or min(ages) >= max(left)


def test_of_pages_that_were_used_together_the_first_comes_first() -> None:
    pages = [a_page(number, 1.0) for number in range(5)]
    assert [page for _, page in taken(HottestPages([(0, 1, pages)], 3))] == pages[:3]


def test_what_left_meanwhile_does_not_come_and_no_more_than_there_is_room_for() -> None:
    pages = [a_page(0, 2.0), a_page(1, 3.0)]
    walk = HottestPages([(7, 10, pages)], 100)
    while walk.step(1):
        pass
    assert walk.take(5, 9) == []
    pages[1].present = False
    assert walk.take(5, 20) == [(7, pages[0])]
    assert len(walk) == 0
