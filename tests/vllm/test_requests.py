"""The request book: what follows from each event in a request's life, over generated histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ems.pool.client.answers import Lease
from ems.pool.keys import KeyChain
from ems.pool.layout import REF_BYTES
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.planes import Plane
from ems.vllm.requests import (
    EAGER_LEASES,
    NOTHING,
    Ask,
    Found,
    Load,
    LoadPart,
    Pages,
    Phase,
    Release,
    RequestBook,
    Span,
)
from tests.kit.examples import examples

BLOCK = 4
REF = REF_BYTES
SETTINGS = ConnectorSettings(saves=True, socket=Path("socket"), directory=Path("pool"))


def make_book(*, saves: bool = True, several_ranks: bool = False, page_blocks: int = 1, **more: Any) -> RequestBook:
    """An engine that waits a second for a lookup, and two for a hand-off."""
    said = ConnectorSettings(saves=saves, socket=Path("socket"), directory=Path("pool"), **more)
    return RequestBook(said, BLOCK, [Plane("p")], page_blocks=page_blocks, several_ranks=several_ranks)


def make_chain(tokens: int, chunk: int = BLOCK) -> KeyChain:
    chain = KeyChain("tenant/model/layout", chunk)
    chain.extend(list(range(tokens)))
    return chain


def make_lease(blocks: int, number: int = 1) -> Lease:
    return Lease("node", 1, number, b"".join(bytes([i]) * REF for i in range(blocks)))


def held_leases(book: RequestBook) -> int:
    return sum(len(request.found.leases) for request in book._requests.values())


def hit(chunks: int, lease: Lease | None = None, *, tail: int = 0, chunk: int = BLOCK) -> Found:
    """What a lookup brings that found ``chunks`` full chunks and ``tail`` tokens of the next one."""
    if not chunks and not tail:
        return NOTHING
    held = lease or make_lease(chunks + bool(tail))
    keys = make_chain(chunks * chunk, chunk).packed(0, chunks) + (b"t" * 16 if tail else b"")
    return Found(chunks * chunk + tail, chunks, (Pages(0, 0, keys, held.packed_refs),), (held,))


def test_a_request_of_one_token_asks_nothing() -> None:
    book = make_book()

    assert book.arrive("r", 1, 0) == []
    assert book.match("r", BLOCK - 1, 0, 0.0) == (0, [])


def test_a_full_hit_counts_every_token_of_the_prompt() -> None:
    """The engine recomputes the last token by itself; one block less would cost a whole block."""
    book = make_book()
    assert book.arrive("r", 8, 0) == [Ask("r", 0)]
    assert book.match("r", 8, 0, 0.1) == (None, [])
    assert book.answered("r", make_chain(8), hit(2, make_lease(2))) == []

    assert book.match("r", 8, 0, 0.2) == (8, [])


def test_a_load_may_begin_and_end_within_a_chunk() -> None:
    book = make_book(page_blocks=3)
    book.arrive("r", 34, 0)
    found = hit(2, tail=7, chunk=12)
    book.answered("r", make_chain(34, 12), found)
    assert book.match("r", 34, 20, 0.0) == (11, [])
    ids = list(range(50, 59))
    (load,) = book.allocated("r", [ids], 11)
    assert isinstance(load, Load)
    pages = found.pages[0]
    assert load.parts == [LoadPart(0, ids[5:8], pages.keys[16:], pages.packed_refs[REF:], skip=2)]
    rest, last = load.split([Plane("p")], 3)
    assert rest.parts == [LoadPart(0, ids[5:7], pages.keys[16:], pages.packed_refs[REF:], skip=2)]
    assert last.parts == [LoadPart(0, ids[7:8], pages.keys[32:], pages.packed_refs[2 * REF :], skip=1)]
    # What is lost within a chunk is offered with all of it.
    assert book.received("r", {ids[6]}) == [Release(found.leases[0])]
    assert book.scheduled("r", [ids], 34, replace=True) == Span(2, 2, 10)


def test_a_load_names_only_the_blocks_after_the_local_ones() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    lease = make_lease(2)
    book.answered("r", make_chain(10), hit(2, lease))
    assert book.match("r", 10, 4, 0.0) == (4, [])

    chain = make_chain(10)
    assert book.allocated("r", [[7, 8, 9]], 4) == [
        Load("r", "node", [LoadPart(0, [8], chain.packed(1, 2), lease.packed_refs[REF : 2 * REF])])
    ]
    assert book.received("r", set()) == [Release(lease)]
    assert held_leases(book) == 0


def test_a_hit_that_the_engine_does_not_take_is_released() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    lease = make_lease(2)
    book.answered("r", make_chain(8), hit(2, lease))
    book.match("r", 8, 0, 0.0)

    assert book.allocated("r", [[1, 2]], 0) == [Release(lease)]


def test_a_hit_that_is_local_already_is_released() -> None:
    book = make_book()
    book.arrive("r", 9, 0)
    lease = make_lease(2)
    book.answered("r", make_chain(9), hit(2, lease))

    assert book.match("r", 9, 8, 0.0) == (0, [Release(lease)])


def test_a_lookup_without_an_answer_becomes_a_miss_and_a_late_answer_is_given_back() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    assert book.match("r", 8, 0, 50.0) == (None, [])
    assert book.match("r", 8, 0, 50.99) == (None, [])
    assert book.match("r", 8, 0, 51.0) == (0, [])
    assert book.take_over() == ["r"]

    lease = make_lease(2)
    assert book.answered("r", make_chain(8), hit(2, lease)) == [Release(lease)]


def test_a_handoff_waits_longer_but_not_for_ever() -> None:
    book = make_book()
    assert book.arrive("r", 8, 2) == [Ask("r", 2)]

    assert book.match("r", 8, 0, 50.0) == (None, [])
    assert book.match("r", 8, 0, 52.9) == (None, [])
    assert book.match("r", 8, 0, 53.0) == (0, [])


def test_a_failed_load_is_not_tried_again() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    book.answered("r", make_chain(8), hit(2, make_lease(2)))
    book.match("r", 8, 0, 0.0)
    book.allocated("r", [[3, 4]], 8)
    assert len(book.received("r", {4})) == 1

    assert book.match("r", 8, 0, 0.0) == (0, [])
    book.preempted("r")
    assert book.match("r", 8, 0, 0.0) == (0, [])


def test_blocks_that_could_not_be_loaded_are_offered_once_they_are_computed() -> None:
    book = make_book()
    book.arrive("r", 16, 0)
    book.answered("r", make_chain(16), hit(4))
    book.match("r", 16, 4, 0.0)
    book.allocated("r", [[1, 2, 3, 4]], 12)
    book.received("r", {3, 4})

    assert book.scheduled("r", [[1, 2, 3, 4]], 16, replace=True) == Span(2, 4, 0)


def test_after_a_reset_nothing_of_before_is_used_or_offered() -> None:
    book = make_book()
    leases = [make_lease(2, number) for number in range(2)]
    for number, lease in enumerate(leases):
        book.arrive(f"r{number}", 8, 0)
        book.answered(f"r{number}", make_chain(8), hit(2, lease))
    book.arrive("asked", 8, 0)
    book.match("r1", 8, 0, 0.0)
    book.allocated("r1", [[1, 2]], 8)

    assert book.reset() == [Release(leases[0])]
    assert book.received("r1", set()) == [Release(leases[1])]
    late = make_lease(2, 9)
    assert book.answered("asked", make_chain(8), hit(2, late)) == [Release(late)]
    assert book.match("r1", 8, 0, 0.0) == (0, [])
    assert book.scheduled("r1", [[1, 2]], 8, replace=True) is None
    assert book.last_save("r1", [[1, 2]], 8) is None
    assert held_leases(book) == 0
    for name in ("r0", "asked"):
        known = book.get(name)
        assert known is not None
        assert (known.phase, known.chain, known.next_save) == (Phase.NEW, None, 0), "it is looked up under other names"
    assert book.start_lookups() == [Ask("r0", 0), Ask("asked", 0)]


def test_many_waiting_requests_hold_few_leases_and_start_few_lookups() -> None:
    """The engine asks for all that wait in each step, first those that came first."""
    book, names = make_book(), [f"r{number}" for number in range(2000)]
    asked = [ask for name in names for ask in book.arrive(name, 8, 0)]
    for step in range(5):
        asked += [effect for name in names for effect in book.match(name, 8, 0, step)[1] if isinstance(effect, Ask)]
        for number, ask in enumerate(asked):
            book.answered(ask.request_id, make_chain(8), hit(2, make_lease(2, number)))
        book.begin_step()
    assert [ask.request_id for ask in asked] == names[:EAGER_LEASES]
    assert held_leases(book) == EAGER_LEASES


def test_who_comes_first_is_looked_up_though_others_came_before() -> None:
    """Where requests have priorities the engine does not ask in the order in which they came."""
    book, names = make_book(), [f"r{number}" for number in range(EAGER_LEASES + 3)]
    for name in names:
        book.arrive(name, 8, 0)
    for name in names[:EAGER_LEASES]:
        book.answered(name, make_chain(8), hit(2))
    order = [*names[-2:], *names[:-2]]
    effects = [effect for name in order for effect in book.match(name, 8, 0, 0.0)[1]]
    assert [effect for effect in effects if isinstance(effect, Ask)] == [Ask(name, 0) for name in names[-2:]]
    assert sum(isinstance(effect, Release) for effect in effects) == 2
    assert book.take_over() == names[EAGER_LEASES - 1 : EAGER_LEASES - 3 : -1]
    book.begin_step()
    full = []
    for name in order:
        assert book.match(name, 8, 0, 0.0)[1] == [], "nothing changes from step to step"
        full.append(book.full)
    assert sum(full) == 3
    assert held_leases(book) == EAGER_LEASES - 2


def test_the_time_for_a_lookup_begins_with_it() -> None:
    book, names = make_book(), [f"r{number}" for number in range(EAGER_LEASES + 1)]
    for name in names:
        book.arrive(name, 8, 0)
    for name in names:
        assert book.match(name, 8, 0, 0.0)[0] is None
    book.finished(names[0])
    book.begin_step()
    assert book.match(names[-1], 8, 0, 100.0) == (None, [Ask(names[-1], 0)])
    assert book.match(names[-1], 8, 0, 100.5) == (None, [])


def test_a_request_whose_blocks_cannot_be_named_is_left_out() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    assert book.leave_out("r") == []

    assert book.match("r", 8, 0, 0.0) == (0, [])
    assert book.scheduled("r", [[1, 2]], 8, replace=True) is None
    assert book.finished("r") == []


def test_blocks_are_offered_once_as_chunks_complete_them() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    book.answered("r", make_chain(10), NOTHING)
    book.match("r", 10, 0, 0.0)
    book.allocated("r", [[5, 6, 7]], 0)

    assert book.scheduled("r", [[5, 6, 7]], 3, replace=True) is None
    assert book.scheduled("r", [[]], 8, replace=False) == Span(0, 2, 0)
    assert book.scheduled("r", [[]], 9, replace=False) is None
    assert book.scheduled("r", [[]], 10, replace=False) == Span(2, 2, 2)
    assert book.scheduled("r", [[]], 40, replace=False) is None
    saved = book.save("r", Span(0, 2, 0), make_chain(10), None)
    assert saved.block_ids == [[5, 6]]
    assert saved.tails == make_chain(10).tails(0, 2)


def test_blocks_that_the_pool_has_are_not_offered() -> None:
    book = make_book()
    book.arrive("r", 12, 0)
    book.answered("r", make_chain(12), hit(2, make_lease(2)))
    book.match("r", 12, 0, 0.0)
    book.allocated("r", [[5, 6, 7]], 8)
    book.received("r", set())

    assert book.scheduled("r", [[5, 6, 7]], 12, replace=True) == Span(2, 3, 0)
    assert book.save("r", Span(2, 3, 0), make_chain(12), None).parent == make_chain(12)[1:2][0]


def test_an_engine_that_only_consumes_offers_nothing() -> None:
    book = make_book(saves=False)
    book.arrive("r", 8, 0)

    assert book.scheduled("r", [[1, 2]], 8, replace=True) is None
    assert book.finished("r") == []


def test_a_part_of_a_block_counts_to_the_token() -> None:
    book = make_book()
    book.arrive("r", 11, 0)
    found = hit(2, tail=2)
    book.answered("r", make_chain(11), found)

    assert book.match("r", 11, 4, 0.0) == (6, [])
    (load,) = book.allocated("r", [[5, 6, 7]], 6)
    assert isinstance(load, Load)
    assert load.parts[0].block_ids == [6, 7]
    assert load.parts[0].keys == found.pages[0].keys[16:]


def test_a_part_that_the_pool_has_whole_is_not_offered_again() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    book.answered("r", make_chain(10), hit(2, tail=2))
    book.match("r", 10, 0, 0.0)
    book.allocated("r", [[5, 6, 7]], 10)
    book.received("r", set())

    assert book.scheduled("r", [[5, 6, 7]], 10, replace=True) is None


def test_the_end_of_a_request_offers_what_its_answer_added() -> None:
    book = make_book()
    book.arrive("r", 6, 0)
    book.answered("r", make_chain(6), NOTHING)
    book.match("r", 6, 0, 0.0)
    assert book.scheduled("r", [[1, 2]], 6, replace=True) == Span(0, 1, 2)

    assert book.last_save("r", [[1, 2, 3]], 11) == Span(1, 2, 3)
    chain = make_chain(11)
    tail = chain.tail(2, [8, 9, 10])
    saved = book.save("r", Span(1, 2, 3), chain, tail)
    assert saved.block_ids == [[2, 3]]
    assert saved.tails == [*chain.tails(1, 2), tail]
    assert saved.partial
    assert saved.number < book.save("r", Span(1, 2, 3), chain, tail).number, "no two have one number"


def test_blocks_that_were_loaded_are_in_the_pool_already() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    book.answered("r", make_chain(10), hit(2))
    book.match("r", 10, 0, 0.0)
    book.allocated("r", [[5, 6, 7]], 8)
    book.received("r", set())
    book.allocated("r", [], 0)
    assert book.scheduled("r", [[5, 6, 7]], 10, replace=True) == Span(2, 2, 2)
    assert book.scheduled("r", [[8]], 13, replace=False) is None

    assert book.last_save("r", [[5, 6, 7, 8]], 13) == Span(2, 3, 1)


def test_a_request_whose_blocks_another_connector_fills_offers_nothing_after_a_reset() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    book.answered("r", make_chain(8), NOTHING)
    book.match("r", 8, 0, 0.0)
    book.allocated("r", [], 0)
    book.reset()

    assert not book.unasked
    assert book.scheduled("r", [[1, 2]], 8, replace=True) is None


def test_an_answer_of_one_token_adds_nothing() -> None:
    """Its own state is never computed."""
    book = make_book()
    book.arrive("r", 6, 0)
    book.answered("r", make_chain(6), NOTHING)
    book.match("r", 6, 0, 0.0)
    book.scheduled("r", [[1, 2]], 6, replace=True)

    assert book.last_save("r", [[1, 2]], 6) is None


def test_the_end_of_a_request_that_waits_gives_its_lease_back() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    lease = make_lease(2)
    book.answered("r", make_chain(8), hit(2, lease))

    assert book.finished("r") == [Release(lease)]
    assert not book._requests


def test_the_end_during_a_load_keeps_the_lease_until_the_load_ends() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    lease = make_lease(2)
    book.answered("r", make_chain(8), hit(2, lease))
    book.match("r", 8, 0, 0.0)
    book.allocated("r", [[1, 2]], 8)

    assert book.finished("r") == []
    assert book.received("r", set()) == [Release(lease)]
    assert not book._requests


def test_a_preempted_request_looks_again_and_offers_its_blocks_again() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    book.answered("r", make_chain(8), NOTHING)
    book.match("r", 8, 0, 0.0)
    book.scheduled("r", [[1, 2]], 8, replace=True)
    book.preempted("r")

    assert book.match("r", 9, 0, 5.0) == (None, [Ask("r", 0)])
    lease = make_lease(1)
    book.answered("r", make_chain(8), hit(1, lease))
    assert book.match("r", 9, 0, 5.0) == (4, [])
    book.allocated("r", [[8, 9, 10]], 4)
    book.received("r", set())
    assert book.scheduled("r", [[8, 9, 10]], 9, replace=True) == Span(1, 2, 0)


def test_more_that_came_while_a_request_waited_takes_the_place_of_what_was_found() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    old, new = make_lease(1, 1), make_lease(3, 2)
    assert book.answered("r", make_chain(10), hit(1, old)) == []
    assert book.match("r", 10, 0, 0.0) == (4, [])

    assert book.answered("r", make_chain(10), hit(2, new, tail=2)) == [Release(old)]
    assert held_leases(book) == 1
    assert book.match("r", 10, 0, 0.1) == (10, [])
    assert book.finished("r") == [Release(new)]


def test_what_was_promised_and_is_gone_is_computed_and_offered() -> None:
    book = make_book()
    book.arrive("r", 10, 0)
    lease = make_lease(3)
    book.answered("r", make_chain(10), hit(2, lease, tail=2))
    assert book.answered("r", make_chain(10), NOTHING) == [Release(lease)]

    assert book.match("r", 10, 0, 0.0) == (0, [])
    book.allocated("r", [[1, 2, 3]], 0)
    assert book.scheduled("r", [[1, 2, 3]], 10, replace=True) == Span(0, 2, 2)


def test_those_behind_are_looked_up_when_one_of_the_first_leaves() -> None:
    book = make_book()
    for number in range(EAGER_LEASES):
        assert book.arrive(f"r{number}", 8, 0) == [Ask(f"r{number}", 0)]
    for name in ("a", "b", "c"):
        assert book.arrive(name, 8, 0) == []
    assert book.start_lookups() == []
    assert book.take_over() == []
    book.finished("b")
    for number in (5, 6):
        book.finished(f"r{number}")
    assert book.take_over() == ["r5", "r6"]
    assert book.start_lookups() == [Ask("a", 0), Ask("c", 0)]
    assert book.start_lookups() == []


def test_a_preempted_request_is_looked_up_before_those_that_wait() -> None:
    book = make_book()
    book.arrive("r", 8, 0)
    book.answered("r", make_chain(8), NOTHING)
    book.match("r", 8, 0, 0.0)
    for number in range(EAGER_LEASES):
        book.arrive(f"r{number}", 8, 0)
    book.arrive("a", 8, 0)
    book.preempted("r")
    book.finished("r0")

    assert book.start_lookups() == [Ask("r", 0)]
    assert book.match("r", 9, 0, 70.0) == (None, [])
    assert book.match("r", 9, 0, 71.0) == (0, [])


def test_waiting_requests_do_not_pin_the_whole_pool() -> None:
    """Beyond a number of leases, a lookup is made when one of those before leaves, or its request's turn comes."""
    book = make_book()
    for number in range(EAGER_LEASES):
        book.arrive(f"r{number}", 8, 0)
        if number % 2:
            book.answered(f"r{number}", make_chain(8), hit(2, make_lease(2, number)))

    assert book.arrive("late", 8, 0) == []
    last = Release(make_lease(2, EAGER_LEASES - 1))
    assert book.match("late", 8, 0, 0.0) == (None, [last, Ask("late", 0)]), "the last one gives way"


def in_step_load(*, several_ranks: bool = False) -> RequestBook:
    """A request of four blocks that loads two of them as part of its first step."""
    book = make_book(several_ranks=several_ranks)
    book.arrive("r", 16, 0)
    book.answered("r", make_chain(16), hit(2))
    assert book.match("r", 16, 0, 0.0, in_step=True) == (8, [])
    book.allocated("r", [[1, 2, 3, 4]], 8)
    return book


def test_with_several_ranks_nothing_is_saved_behind_a_load_that_may_fail() -> None:
    book = in_step_load(several_ranks=True)
    assert book.scheduled("r", [[1, 2, 3, 4]], 15, replace=True) is None
    book.received("r", {2})
    assert book.scheduled("r", [], 16, replace=False) == Span(1, 4, 0)


def test_a_request_that_is_computed_before_its_lookup_ends_holds_nothing() -> None:
    book = make_book()
    book.arrive("r", 16, 0)
    assert book.match("r", 16, 0, 0.0) == (None, [])
    book.allocated("r", [[1, 2, 3, 4]], 0)
    lease = make_lease(2)
    assert book.answered("r", make_chain(16), hit(2, lease)) == [Release(lease)]
    assert held_leases(book) == 0


class Life(RuleBasedStateMachine):
    """Any order of events that an engine may produce: leases balance, offers never overlap."""

    live = Bundle("live")
    page_blocks = 1

    def __init__(self) -> None:
        super().__init__()
        self.chunk = self.page_blocks * BLOCK
        self.book = make_book(page_blocks=self.page_blocks)
        self.now = 0.0
        self.counter = 0
        self.held: dict[int, Lease] = {}
        self.asked: set[str] = set()
        self.loading: dict[str, list[int]] = {}
        self.in_step: set[str] = set()
        self.prompt: dict[str, int] = {}
        self.offered: dict[str, int] = {}
        self.ended: set[str] = set()

    def do(self, effects: list[Ask | Load | Release]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.asked.add(effect.request_id)
            elif isinstance(effect, Release):
                del self.held[effect.lease.number]
            else:
                assert effect.request_id not in self.loading
                (part,) = effect.parts
                assert 0 <= part.skip < self.page_blocks
                pages = -(-(part.skip + len(part.block_ids)) // self.page_blocks)
                assert len(part.packed_refs) == REF * pages
                known = self.book.get(effect.request_id)
                assert known is not None
                first = (known.local // BLOCK) // self.page_blocks
                assert part.skip == known.local // BLOCK - first * self.page_blocks
                assert part.keys == known.found.pages[0].keys[16 * first : 16 * (first + pages)]
                self.loading[effect.request_id] = part.block_ids
        for name in self.book.take_over():
            known = self.book.get(name)
            assert known is None or known.phase not in (Phase.ASKED, Phase.ANSWERED)

    @rule(target=live, tokens=st.integers(1, 30), expected=st.integers(0, 3))
    def arrive(self, tokens: int, expected: int) -> str:
        self.counter += 1
        name = f"r{self.counter}"
        self.prompt[name] = tokens
        self.offered[name] = 0
        self.do(list(self.book.arrive(name, tokens, expected)))
        return name

    @rule()
    def start_lookups(self) -> None:
        self.do(list(self.book.start_lookups()))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if data.draw(st.booleans()):
            self.asked.discard(name)  # otherwise it may be answered again
        tokens = data.draw(st.integers(0, self.prompt[name]))
        chunks, tail = divmod(tokens, self.chunk)
        found = NOTHING
        if tokens:
            self.counter += 1
            lease = make_lease(chunks + bool(tail), self.counter)
            self.held[lease.number] = lease
            found = hit(chunks, lease, tail=tail, chunk=self.chunk)
        self.do(list(self.book.answered(name, make_chain(self.prompt[name], self.chunk), found)))

    @rule(name=live, data=st.data())
    def schedule(self, name: str, data: st.DataObject) -> None:
        """The engine's own order: match, allocate, then wait for a load or compute a chunk, also behind one."""
        if name in self.loading or name in self.ended:
            return
        tokens = self.prompt[name]
        local = data.draw(st.integers(0, (tokens - 1) // BLOCK)) * BLOCK
        in_step = data.draw(st.booleans())
        found, effects = self.book.match(name, tokens, local, self.now, in_step=in_step)
        self.do(list(effects))
        if found is None:
            return
        assert 0 <= found <= tokens - local - in_step
        ids = list(range(100, 100 + -(-tokens // BLOCK)))
        take = found if data.draw(st.booleans()) else 0
        self.do(list(self.book.allocated(name, [ids], take)))
        if take:
            assert self.loading[name] == ids[local // BLOCK : -(-(local + take) // BLOCK)]
            if not in_step:
                return
            self.in_step.add(name)
        after = data.draw(st.integers(local + take + 1 if take else 0, tokens))
        span = self.book.scheduled(name, [ids], after, replace=True)
        if span is not None:
            assert self.offered[name] <= span.first <= span.end <= after // self.chunk
            assert span.first < span.end or span.tail
            assert span.tail in (0, tokens % self.chunk)
            self.offered[name] = span.end
            chain = make_chain(tokens, self.chunk)
            tail = chain.tail(span.end, list(range(span.tail))) if span.tail else None
            save = self.book.save(name, span, chain, tail)
            begin, end = span.first * self.chunk, span.end * self.chunk + span.tail
            assert save.block_ids == [ids[begin // BLOCK : -(-end // BLOCK)]]
            assert save.tails == [*chain.tails(span.first, span.end), *([tail] if tail else [])]

    @rule(name=live, failed=st.booleans())
    def load_ends(self, name: str, failed: bool) -> None:
        blocks = self.loading.pop(name, None)
        if blocks is None:
            return
        self.do(list(self.book.received(name, set(blocks[1:]) if failed else set())))
        known = self.book.get(name)
        if failed and name in self.in_step and known is not None:
            # What was computed behind blocks that hold nothing is computed, and offered, once more.
            self.offered[name] = known.next_save
        self.in_step.discard(name)

    @rule(name=live)
    def preempt(self, name: str) -> None:
        known = self.book.get(name)
        if known is not None and known.phase is Phase.SETTLED and name not in self.ended:
            self.book.preempted(name)
            self.offered[name] = 0

    @rule(target=live, name=consumes(live))
    def finish(self, name: str) -> object:
        if name in self.ended:
            return name
        self.ended.add(name)
        self.do(list(self.book.finished(name)))
        return name if name in self.loading else multiple()

    @invariant()
    def every_lease_has_one_holder(self) -> None:
        assert held_leases(self.book) == len(self.held)

    def teardown(self) -> None:
        for name in list(self.asked):
            self.do(list(self.book.answered(name, make_chain(self.prompt[name], self.chunk), NOTHING)))
        for name in self.prompt:
            if name not in self.ended:
                self.do(list(self.book.finished(name)))
        for name in list(self.loading):
            self.do(list(self.book.received(name, set())))
        assert self.held == {}
        assert not self.book._requests


TestLife = Life.TestCase
TestLife.settings = examples(150, stateful_step_count=40)


def test_an_engine_that_does_not_load_never_asks_but_saves() -> None:
    book = make_book(loads=False)

    assert book.arrive("a", 10, 0) == []
    assert book.match("a", 10, 0, 0.0) == (0, [])
    book.allocated("a", [[5, 6, 7]], 0)
    assert book.scheduled("a", [[5, 6, 7]], 10, replace=True) == Span(0, 2, 2)

    book.preempted("a")
    assert book.match("a", 10, 0, 1.0) == (0, [])


def test_an_engine_may_be_told_to_save_full_blocks_only() -> None:
    book = make_book(save_tails=False)
    book.arrive("a", 10, 0)
    book.allocated("a", [[5, 6, 7]], 0)

    assert book.scheduled("a", [[5, 6, 7]], 10, replace=True) == Span(0, 2, 0)
    assert book.last_save("a", [[5, 6, 7]], 11) is None


def test_states_are_saved_where_the_engine_says_that_they_are_and_loaded_behind_the_last_chunk() -> None:
    planes = [Plane("attention", group=1), Plane("state", group=0, window=1, state=True)]
    book = RequestBook(SETTINGS, BLOCK, planes, 2)
    chain = make_chain(2 * BLOCK + 1)
    book.arrive("a", 2 * BLOCK + 1, 0)
    book.allocated("a", [], 0)

    span = book.scheduled("a", [[0, 9, 8], [5, 6, 7]], 2 * BLOCK + 1, replace=True)
    assert span == Span(0, 2, 0)  # no part of a block: there is no state behind it
    assert book.save("a", span, chain, None).block_ids == [[], [5, 6]]
    assert book.stored_tokens("a") == 0

    assert not book.takes_states("a", BLOCK + 1)
    assert book.takes_states("a", 2 * BLOCK)
    save = book.save_states("a", 2 * BLOCK, chain, {0: 9})
    assert (save.first, save.block_ids, save.tails) == (1, [[9], []], chain.tails(1, 2))
    assert save.parent == chain.parent(1)
    assert book.stored_tokens("a") == 2 * BLOCK

    book.arrive("b", 2 * BLOCK + 1, 0)
    pages = tuple(
        Pages(plane, first, chain.packed(first, 2), bytes((2 - first) * REF_BYTES)) for plane, first in ((0, 0), (1, 1))
    )
    book.answered("b", chain, Found(2 * BLOCK, 2, pages, (Lease("node", 1, 1, b""),)))
    assert book.match("b", 2 * BLOCK + 1, 0, 0.0)[0] == 2 * BLOCK
    (load,) = book.allocated("b", [[0, 4], [2, 3]], 2 * BLOCK)
    assert isinstance(load, Load)
    assert [(part.plane, part.block_ids, part.keys) for part in load.parts] == [
        (0, [2, 3], chain.packed(0, 2)),
        (1, [4], chain.packed(1, 2)),
    ]


@pytest.mark.parametrize("why", ["saves nothing", "is paused", "is unknown", "ended with a reset"])
def test_states_are_not_saved_where_nothing_is(why: str) -> None:
    planes = [Plane("state", window=1, state=True)]
    book = RequestBook(msgspec.structs.replace(SETTINGS, saves=why != "saves nothing"), BLOCK, planes)
    if why != "is unknown":
        book.arrive("a", 2 * BLOCK, 0)
    book.paused = why == "is paused"
    if why == "ended with a reset":
        book.leave_out("a")
    assert not book.takes_states("a", BLOCK)


class LifeInChunks(Life):
    """The same where a page has the state of three blocks."""

    page_blocks = 3


TestLifeInChunks = LifeInChunks.TestCase
