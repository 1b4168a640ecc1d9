"""Which blocks others are told of: those that are whole in the pool, whatever the order in which news come."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.protocol.messages import ChangeRun
from ems.vllm.kv_events import announced
from ems.vllm.kv_events.announced import Announced, BlockEvent, Chunk, Page

SHARDS = 2
PLANES = (0, 1)
"""Two planes of one group, each with two pages a block."""


def chunk(*numbers: int) -> Chunk:
    first = numbers[0]
    return Chunk(0, numbers, first - 1 if first else None, tuple(n for n in numbers for _ in range(4)))


def stored(*numbers: int) -> BlockEvent:
    return BlockEvent(chunk(*numbers), stored=True)


def removed(*numbers: int) -> BlockEvent:
    return BlockEvent(Chunk(0, numbers), stored=False)


def pages(number: int) -> list[Page]:
    return [(plane, b"%8d%8d" % (number, shard)) for plane, shard in product(PLANES, range(SHARDS))]


def run(page: Page, *, stored: bool) -> ChangeRun:
    return ChangeRun(page[0], stored, page[1])


def offer(*numbers: int) -> list[tuple[Chunk, list[Page]]]:
    return [(chunk(number), pages(number)) for number in numbers]


def store(*numbers: int) -> list[ChangeRun]:
    return [run(page, stored=True) for number in numbers for page in pages(number)]


def test_a_block_is_told_of_when_its_last_page_is_committed() -> None:
    known = Announced()
    assert known.offered(offer(0)) == []
    *first, last = store(0)
    assert known.changed(first) == []
    assert known.changed([last]) == [stored(0)]


def test_all_blocks_of_a_chunk_are_told_of_and_taken_back() -> None:
    known = Announced()
    known.offered([(chunk(0, 1), pages(1))])
    assert known.changed(store(1)) == [stored(0, 1)]
    assert known.changed([run(pages(1)[0], stored=False)]) == [removed(0, 1)]


def test_pages_that_were_committed_before_the_offer_count() -> None:
    """Another engine stored them, or the news came sooner."""
    known = Announced()
    assert known.changed(store(0)) == []
    assert known.offered(offer(0, 1)) == [stored(0)]
    assert known.offered(offer(0)) == []


def test_a_block_that_loses_a_page_is_taken_back_once() -> None:
    known = Announced()
    known.offered(offer(0))
    known.changed(store(0))
    gone = [run(page, stored=False) for page in pages(0)]

    assert known.changed(gone[:2]) == [removed(0)]
    assert known.changed(gone[2:]) == []
    assert known.changed(store(0)) == []
    assert known.offered(offer(0)) == [stored(0)]


def test_a_block_whose_lost_page_is_stored_again_is_told_of_when_it_is_offered_again() -> None:
    """The other pages are still there, and the node says nothing of them a second time."""
    known = Announced()
    known.offered(offer(0))
    known.changed(store(0))
    page = pages(0)[1]
    assert known.changed([run(page, stored=False), run(page, stored=True)]) == [removed(0)]

    assert known.offered(offer(0)) == [stored(0)]


def test_blocks_that_a_lookup_found_are_told_of_at_once() -> None:
    known = Announced()
    assert known.offered(offer(0, 1), present=True) == [stored(0), stored(1)]
    assert known.offered(offer(0, 1), present=True) == []


def test_all_is_taken_back_when_nothing_is_known_any_more() -> None:
    known = Announced()
    known.offered(offer(0, 1, 2))
    known.changed(store(0, 2))

    assert known.withdraw() == [removed(0), removed(2)]
    assert not known._chunks
    assert known.withdraw() == []


def test_who_is_forgotten_for_want_of_room_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "MOST_CHUNKS", 2)
    monkeypatch.setattr(announced, "MOST_STRAYS", 8)
    known = Announced()
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
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), NUMBERS, st.just(0)),
        st.tuples(st.just("find"), NUMBERS, st.just(0)),
        st.tuples(st.just("flip"), NUMBERS, st.integers(0, len(pages(0)) - 1)),
        st.tuples(st.just("withdraw"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_after_any_history_those_are_told_of_that_were_offered_and_are_whole(
    history: list[tuple[str, int, int]],
) -> None:
    known = Announced()
    here: set[Page] = set()
    wanted: set[int] = set()
    told: set[object] = set()
    for what, number, which in history:
        page = pages(number)[which]
        whole = here.issuperset(pages(number))
        if what == "offer":
            wanted.add(number)
            events = known.offered(offer(number))
        elif what == "find" and whole:
            wanted.add(number)
            events = known.offered(offer(number), present=True)
        elif what == "flip":
            events = known.changed([run(page, stored=page not in here)])
            here ^= {page}
        elif what == "withdraw":
            events = known.withdraw()
            # What is in the pool is not known either, until it is stored anew.
            here, wanted = set(), set()
        else:
            continue
        for news in events:
            (name,) = news.chunk.names
            if news.stored:
                assert name not in told
                told.add(name)
            else:
                told.remove(name)
                wanted.remove(int(str(name)))
        assert told == {number for number in wanted if here.issuperset(pages(number))}
