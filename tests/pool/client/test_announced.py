"""Which blocks others are told of: those that are whole in the pool, whatever the order in which news come."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client import announced
from ems.pool.client.announced import AGAIN_SECONDS, Announced, BlockEvent, Chunk, Page
from ems.pool.protocol.messages import ChangeRun

SHARDS = 2
PLANES = (0, 1)
"""Two planes of one group, each with two pages a block."""


def chunk(*numbers: int) -> Chunk:
    first = numbers[0]
    return Chunk(0, numbers, first - 1 if first else None, bytes(numbers))


def stored(*numbers: int, medium: int = 0) -> BlockEvent:
    return BlockEvent(chunk(*numbers), stored=True, medium=medium)


def removed(*numbers: int, medium: int = 0) -> BlockEvent:
    return BlockEvent(Chunk(0, numbers), stored=False, medium=medium)


def pages(number: int) -> list[Page]:
    return [(plane, b"%8d%8d" % (number, shard)) for plane, shard in product(PLANES, range(SHARDS))]


def run(page: Page, *, stored: bool, medium: int = 0) -> ChangeRun:
    return ChangeRun(medium * len(PLANES) + page[0], stored, page[1])


def offer(*numbers: int) -> list[tuple[Chunk, list[Page]]]:
    return [(chunk(number), pages(number)) for number in numbers]


def store(*numbers: int, medium: int = 0) -> list[ChangeRun]:
    return [run(page, stored=True, medium=medium) for number in numbers for page in pages(number)]


def lose(number: int, medium: int = 0) -> list[ChangeRun]:
    return [run(page, stored=False, medium=medium) for page in pages(number)]


def test_a_block_is_told_of_when_its_last_page_is_committed() -> None:
    known = Announced(len(PLANES))
    assert known.offered(offer(0)) == []
    *first, last = store(0)
    assert known.changed(first) == []
    assert known.changed([last]) == [stored(0)]


def test_all_blocks_of_a_chunk_are_told_of_and_taken_back() -> None:
    known = Announced(len(PLANES))
    known.offered([(chunk(0, 1), pages(1))])
    assert known.changed(store(1)) == [stored(0, 1)]
    assert known.changed([run(pages(1)[0], stored=False)]) == [removed(0, 1)]


def test_pages_that_were_committed_before_the_offer_count() -> None:
    """Another engine stored them, or the news came sooner."""
    known = Announced(len(PLANES))
    assert known.changed(store(0)) == []
    assert known.offered(offer(0, 1)) == [stored(0)]
    assert known.offered(offer(0)) == []


def test_a_block_that_loses_a_page_is_taken_back_once() -> None:
    known = Announced(len(PLANES))
    known.offered(offer(0))
    known.changed(store(0))
    gone = lose(0)

    assert known.changed(gone[:2]) == [removed(0)]
    assert known.changed(gone[2:]) == []
    assert not known._chunks
    assert known.changed(store(0)) == []
    assert known.offered(offer(0)) == [stored(0)]


def test_a_block_whose_lost_page_is_stored_again_is_told_of_again() -> None:
    """The other pages are still there, and the node says nothing of them a second time."""
    known = Announced(len(PLANES))
    known.offered(offer(0))
    known.changed(store(0))
    page = pages(0)[1]

    assert known.changed([run(page, stored=False), run(page, stored=True)]) == [removed(0), stored(0)]


def test_each_medium_is_told_of_by_itself() -> None:
    known = Announced(len(PLANES))
    known.offered(offer(0))
    assert known.changed(store(0)) == [stored(0)]
    assert known.changed(store(0, medium=1)) == [stored(0, medium=1)]
    assert known.changed(lose(0)) == [removed(0)]
    assert known.changed(store(0)) == [stored(0)]
    assert known.changed(lose(0, medium=1)) == [removed(0, medium=1)]
    assert known.withdraw() == [removed(0)]


def test_pages_that_a_tier_had_before_the_offer_count() -> None:
    known = Announced(len(PLANES))
    assert known.changed(store(0, medium=2)) == []
    assert known.found(offer(0), 0.0) == [stored(0, medium=2), stored(0)]


def test_blocks_that_are_found_long_after_are_told_of_again() -> None:
    """A router that was started since, or forgot all when the engine cleared its cache, learns of them so."""
    known = Announced(len(PLANES))
    known.offered(offer(0))
    known.changed([*store(0), *store(0, medium=1)])
    assert known.found(offer(0), 100.0) == []
    assert known.found(offer(0), 100.0 + AGAIN_SECONDS) == [stored(0), stored(0, medium=1)]
    assert known.found(offer(0), 101.0 + AGAIN_SECONDS) == []
    assert known.withdraw() == [removed(0), removed(0, medium=1)]


def test_a_block_that_only_a_tier_has_is_still_told_of_when_it_comes_back() -> None:
    known = Announced(len(PLANES))
    known.offered(offer(0))
    for page in pages(0):  # each leaves memory as soon as the tier has it
        known.changed([run(page, stored=True), run(page, stored=True, medium=1), run(page, stored=False)])

    assert known.withdraw() == [removed(0, medium=1)]


def test_blocks_that_a_lookup_found_are_told_of_at_once() -> None:
    known = Announced(len(PLANES))
    assert known.found(offer(0, 1), 0.0) == [stored(0), stored(1)]
    assert known.found(offer(0, 1), 1.0) == []


def test_all_is_taken_back_when_nothing_is_known_any_more() -> None:
    known = Announced(len(PLANES))
    known.offered(offer(0, 1, 2))
    known.changed(store(0, 2))

    assert known.withdraw() == [removed(0), removed(2)]
    assert not known._chunks
    assert known.withdraw() == []


def test_who_is_forgotten_for_want_of_room_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "MOST_CHUNKS", 2)
    monkeypatch.setattr(announced, "MOST_STRAYS", 8)
    known = Announced(len(PLANES))
    told: list[BlockEvent] = []
    for number in range(10):
        told += known.offered(offer(number))
        told += known.changed(store(number))

    assert told.count(stored(5)) == 1
    assert [news for news in told if not news.stored] == [removed(number) for number in range(8)]
    assert len(known._chunks) == 2
    assert len(known._strays) == 8
    assert len(known._by_page) == 2 * len(pages(0))


NUMBERS = st.integers(0, 3)
MEDIA = st.integers(0, 2)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), NUMBERS, st.just(0), st.just(0)),
        st.tuples(st.just("find"), NUMBERS, st.just(0), st.just(0)),
        st.tuples(st.just("flip"), NUMBERS, st.integers(0, len(pages(0)) - 1), MEDIA),
        st.tuples(st.just("withdraw"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_after_any_history_those_are_told_of_that_were_offered_and_are_whole(
    history: list[tuple[str, int, int, int]],
) -> None:
    known = Announced(len(PLANES))
    here: set[tuple[int, Page]] = set()
    wanted: set[int] = set()
    told: set[tuple[object, int]] = set()

    def whole(number: int, medium: int) -> bool:
        return here.issuperset((medium, page) for page in pages(number))

    for what, number, which, medium in history:
        page = pages(number)[which]
        if what == "offer":
            wanted.add(number)
            events = known.offered(offer(number))
        elif what == "find" and whole(number, 0):
            wanted.add(number)
            events = known.found(offer(number), 0.0)
        elif what == "flip":
            events = known.changed([run(page, stored=(medium, page) not in here, medium=medium)])
            here ^= {(medium, page)}
            if not any(one in pages(number) for _, one in here):
                wanted.discard(number)  # forgotten: nothing of it is anywhere
        elif what == "withdraw":
            events = known.withdraw()
            # What is in the pool is not known either, until it is stored anew.
            here, wanted = set(), set()
        else:
            continue
        for news in events:
            (name,) = news.chunk.names
            if news.stored:
                assert (name, news.medium) not in told
                told.add((name, news.medium))
            else:
                told.remove((name, news.medium))
        assert told == {(number, medium) for number in wanted for medium in range(3) if whole(number, medium)}
