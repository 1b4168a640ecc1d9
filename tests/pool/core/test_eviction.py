"""Who leaves first, and what may not leave at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.config import POLICIES, PolicyName
from ems.pool.core.eviction import PATIENCE, evict, evict_segment, oldest_segment
from ems.pool.core.index import Index
from ems.pool.core.pins import PinSet
from ems.pool.keys import NO_PARENT
from ems.pool.layout import PageRef
from ems.pool.pages import Page
from ems.pool.policy.seam import make_policy
from tests.pool.brain import chain, key
from tests.pool.wrong_core import wrong_index


class Pool:
    """Pages in segments, and which of them were freed."""

    def __init__(self, policy: PolicyName = "lru") -> None:
        self.index = Index(make_policy(policy))
        self.pins = PinSet()
        self.freed: list[bytes] = []
        self._next = 0

    def add(self, keys: list[bytes], before: bytes = bytes(NO_PARENT), segments: list[int] | None = None) -> list[Page]:
        pages = []
        for at, one in enumerate(keys):
            self._next += 1
            ref = PageRef(segments[at] if segments else 0, self._next, 1)
            pages.append(self.index.insert(one, ref.pack(), before))
            before = one
        self.index.publish(pages)
        return pages

    def free(self, page: Page) -> None:
        assert len(page.ref) > 0, "where the page lies was forgotten before its slot was freed"
        self.freed.append(page.key)

    def evict(self, count: int) -> int:
        return evict(self.index, count, self.free, self.pins)


def test_the_oldest_leave_first_and_no_more_than_asked() -> None:
    pool = Pool()
    for name in "abcd":
        pool.add([key(name)])
    assert pool.evict(2) == 2
    assert pool.freed == [key("a"), key("b")]
    assert pool.evict(9) == 2
    assert pool.evict(1) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_new_pages_that_are_leased_keep_no_proven_one_from_leaving(policy: PolicyName) -> None:
    pool = Pool(policy)
    pool.index.policy.resize(20)
    proven = [page for name in "abcd" for page in pool.add([key(name)])]
    pool.index.use(proven)
    leased = [page for name in "efg" for page in pool.add([key(name)])]
    for page in leased:
        page.leases = 1
    assert pool.evict(4) == 4
    assert pool.evict(1) == 0
    for page in leased:
        page.leases = 0
    assert pool.evict(9) == 3


def test_a_prompt_leaves_from_its_end() -> None:
    pool = Pool()
    keys = chain("x", 4)
    pool.add(keys)
    pool.evict(3)
    assert pool.freed == [*reversed(keys[1:])]


def test_leased_pages_and_their_prefixes_stay() -> None:
    pool = Pool()
    keys = chain("x", 4)
    pages = pool.add(keys)
    pool.add([key("other")])
    pages[2].leases = 1
    assert pool.evict(9) == 2
    assert pool.freed == [keys[3], key("other")]
    pages[2].leases = 0
    assert pool.evict(9) == 3


def test_a_prefix_of_a_page_being_written_stays() -> None:
    pool = Pool()
    keys = chain("x", 2)
    pool.add(keys[:1])
    writing = pool.index.insert(keys[1], PageRef(0, 9, 1).pack(), keys[0])
    assert pool.evict(9) == 0
    pool.index.discard(writing)
    assert pool.evict(9) == 1


def test_a_pass_over_pages_that_stay_is_short_and_the_next_begins_behind_it() -> None:
    pool = Pool()
    for number in range(PATIENCE + 100):
        pool.add([key(number)])[0].leases = 1
    pool.add([key("free")])
    assert pool.evict(1) == 0
    assert pool.evict(1) == 1
    assert pool.freed == [key("free")]


def test_pinned_pages_stay() -> None:
    pool = Pool()
    for name in "abc":
        pool.add([key(name)])
    pool.pins.pin([key("a"), key("b")], 10.0, most=1)
    assert pool.evict(9) == 2
    assert pool.freed == [key("b"), key("c")]
    pool.pins.tick(10.0)
    assert pool.evict(9) == 1


def test_what_a_waiting_request_needs_leaves_last() -> None:
    pool = Pool()
    for name in "abcd":
        pool.add([key(name)])
    pool.pins.awaited.update([key("a"), key("b")])
    assert pool.evict(2) == 2
    assert pool.freed == [key("c"), key("d")]
    assert pool.evict(1) == 1
    assert pool.freed[-1] in {key("a"), key("b")}


# Segments


def test_the_segment_not_used_for_longest_is_emptied() -> None:
    pool = Pool()
    for name, segment in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        pool.add([key(name)], segments=[segment])
    assert oldest_segment(pool.index, [], ()) == 2
    assert oldest_segment(pool.index, [], {2}) == 1
    assert oldest_segment(pool.index, [], {0, 1, 2}) is None
    page = pool.index.get(key("a"))
    assert page is not None
    assert oldest_segment(pool.index, [page], ()) == 1
    assert evict_segment(pool.index, 2, pool.free) == 2
    assert sorted(pool.freed) == sorted([key("a"), key("c")])


def test_a_held_suffix_keeps_the_segments_of_its_whole_prefix() -> None:
    pool = Pool()
    pages = pool.add(chain("x", 3), segments=[0, 1, 2])
    pool.add([key("y")], segments=[3])
    assert oldest_segment(pool.index, [pages[1]], ()) == 2
    assert oldest_segment(pool.index, [pages[2]], ()) == 3


def test_a_segment_takes_suffixes_elsewhere_along_also_behind_a_missing_page() -> None:
    pool = Pool()
    keys = chain("x", 4)
    pages = pool.add(keys, segments=[0, 1, 2, 3])
    pool.index.discard(pages[1])
    assert evict_segment(pool.index, 0, pool.free) == 3
    assert pool.freed == [keys[3], keys[2], keys[0]]
    assert (len(pool.index), len(pool.index._missing)) == (0, 0)


PATHS = ["a", "ab", "abc", "abd", "abde", "f", "fg", "fh", "i"]


@given(st.lists(st.integers(0, 3), min_size=len(PATHS), max_size=len(PATHS)), st.integers(0, 3), st.permutations(PATHS))
def test_emptying_a_segment_discards_its_pages_and_their_suffixes_only(
    segments: list[int], leaving: int, arrival: list[str]
) -> None:
    pool, home = Pool(), dict(zip(PATHS, segments, strict=True))
    for path in arrival:
        before = key(path[:-1]) if len(path) > 1 else bytes(NO_PARENT)
        pool.add([key(path)], before, [home[path]])
    fallen = {path for path in PATHS if any(home[path[:end]] == leaving for end in range(1, len(path) + 1))}
    assert evict_segment(pool.index, leaving, pool.free) == len(fallen)
    assert set(pool.freed) == {key(path) for path in fallen}
    place = {one: at for at, one in enumerate(pool.freed)}
    assert all(place[key(path)] < place[key(path[:-1])] for path in fallen if path[:-1] in fallen), (
        "a prefix left before its suffix"
    )
    assert wrong_index(pool.index) == []
