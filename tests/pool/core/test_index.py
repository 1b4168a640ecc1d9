"""The order of use, and how pages hang together, against the plainest possible account of both."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.index import Index
from ems.pool.keys import NO_PARENT
from ems.pool.layout import PageRef
from ems.pool.pages import Page
from tests.pool.brain import chain, key
from tests.pool.wrong_core import wrong_index

REF = PageRef(0, 0, 1).pack()


def index_of(*chains: list[bytes]) -> Index:
    """An index in which each chain was written and published in one go."""
    index = Index()
    for keys in chains:
        index.publish(insert(index, keys))
    return index


def insert(index: Index, keys: list[bytes], before: bytes = bytes(NO_PARENT)) -> list[Page]:
    pages = []
    for one in keys:
        pages.append(index.insert(one, REF, before))
        before = one
    return pages


def order(index: Index) -> list[bytes]:
    """Keys from the least to the most recently used, read in both directions."""
    forward = list(index.policy)
    backward = []
    page = forward[-1] if forward else None
    while page is not None:
        backward.append(page)
        page = page.older
    assert backward == forward[::-1]
    assert wrong_index(index) == []
    return [page.key for page in forward]


# Order of use

FOREST = [chain("a", 5), chain("b", 3), [key("c")], [key("d")]]
ALL = [one for keys in FOREST for one in keys]


@given(st.lists(st.lists(st.sampled_from(range(len(ALL))), max_size=7), max_size=12))
def test_using_pages_makes_them_and_their_prefix_the_newest(uses: list[list[int]]) -> None:
    index = index_of(*FOREST)
    expected = order(index)
    for use in uses:
        pages = [page for at in use if (page := index.get(ALL[at])) is not None]
        index.use(pages)
        prefix = [page.key for page in pages[0].ancestors()] if pages else []
        for one in [*[page.key for page in reversed(pages)], *prefix]:
            expected.remove(one)
            expected.append(one)
        if len(set(use)) == len(use):
            assert order(index) == expected
        else:
            # Of a page that is named twice either place will do.
            assert sorted(expected) == sorted(order(index))
            expected = order(index)


@given(st.permutations(range(5)), st.integers(0, 4))
def test_a_suffix_is_always_older_than_its_prefix(turns: list[int], length: int) -> None:
    index = index_of(*FOREST)
    keys = FOREST[0]
    for turn in turns:
        index.use([page for one in keys[: turn + 1] if (page := index.get(one)) is not None])
        place = {one: at for at, one in enumerate(order(index))}
        assert [place[one] for one in keys] == sorted((place[one] for one in keys), reverse=True)


def test_published_pages_are_the_newest_the_first_of_them_the_very_newest() -> None:
    index = index_of([key("old")], chain("x", 3))
    assert order(index) == [key("old"), *reversed(chain("x", 3))]


def test_publishing_a_suffix_takes_its_prefix_along() -> None:
    keys = chain("x", 6)
    index = index_of(keys[:3], [key("between")])
    index.publish(insert(index, keys[3:], keys[2]))
    assert order(index) == [key("between"), *reversed(keys)]


def test_publishing_what_others_hang_on_leaves_these_alone() -> None:
    first, second = chain("x", 2)
    index = Index()
    index.publish(insert(index, [second], first))
    index.publish(insert(index, [key("other")]))
    index.publish(insert(index, [first]))
    assert order(index) == [second, key("other"), first]


# Hanging together


def test_a_page_hangs_on_the_one_before_also_while_that_is_written() -> None:
    index = Index()
    first, second = insert(index, chain("x", 2))
    assert second.parent is first
    assert list(first.children()) == [second]
    assert wrong_index(index) == []


def test_a_missing_prefix_is_remembered_while_something_hangs_on_it() -> None:
    index, keys = Index(), chain("x", 3)
    (third,) = insert(index, keys[2:], keys[1])
    assert len(index._missing) == 1
    assert index.get(keys[1]) is None
    second = insert(index, keys[1:2], keys[0])[0]
    assert third.parent is second
    assert len(index._missing) == 1
    index.discard(third)
    index.discard(second)
    assert (len(index._missing), len(index)) == (0, 0)


def test_a_page_that_leaves_under_others_is_remembered_as_missing() -> None:
    index, keys = Index(), chain("x", 3)
    first, second, third = insert(index, keys)
    index.publish([first])
    index.discard(second)
    assert (index.get(keys[1]), len(index._missing)) == (None, 1)
    assert list(third.ancestors()) == [second, first]
    index.publish([third])
    index.use([third])
    again = index.insert(keys[1], REF, keys[0])
    assert again is second
    assert len(index._missing) == 0
    index.discard(third)
    index.discard(again)
    assert (first.suffixes, len(index._missing)) == (None, 0)
    assert wrong_index(index) == []


def test_a_chain_of_missing_prefixes_is_forgotten_with_its_last_page() -> None:
    index, keys = Index(), chain("x", 4)
    pages = insert(index, keys)
    for page in pages[:3]:
        index.discard(page)
    assert len(index._missing) == 3
    index.discard(pages[3])
    assert (len(index._missing), len(index)) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_no_lie_about_prefixes_makes_a_ring(claims: list[tuple[int, int, bool]]) -> None:
    index = Index()
    for name, before, stays in claims:
        if index.get(key(name)) is None:
            page = index.insert(key(name), REF, key(before))
            index.publish([page])
            assert page not in page.ancestors()
            if not stays:
                index.discard(page)
        assert wrong_index(index) == []


def test_check_sees_what_is_wrong() -> None:
    index = index_of(chain("x", 3))
    page = index.get(chain("x", 3)[1])
    assert page is not None
    suffix, page.suffixes = page.suffixes, None
    assert "has 0 suffixes, expected 1" in wrong_index(index)[0]
    page.suffixes = suffix
    page.present = False
    assert wrong_index(index) == ["the pages that the policy orders are not the present pages"]


# Looking up


def test_leading_stops_at_the_first_gap() -> None:
    keys = chain("x", 5)
    index = index_of(keys[:2])
    insert(index, keys[2:4], keys[1])
    assert [page.key for page in index.leading(keys)] == keys[:2]
    assert index.leading(keys[2:]) == []
    assert index.leading([]) == []
    assert index.pending(keys, 2) == 2
    assert index.pending(keys, 4) == 0
    assert index.pending([keys[0], key("gap"), keys[1]], 0) == 1
