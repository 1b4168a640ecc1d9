"""Slots that rest, and those that are not used again."""

from __future__ import annotations

from ems.pool.core.rest import LIMBO_SECONDS, Rest
from ems.pool.core.space import Space
from ems.pool.segments.layout import PageRef
from tests.pool.brain import segment_for

PAGE = 8192


def with_slots(count: int) -> tuple[Space, list[bytes]]:
    space = Space([segment_for(4, PAGE)])
    space.touch(0, segment_for(4, PAGE))
    space.assign(space.segments[0], 0, PAGE)
    taken = [space.take(0) for _ in range(count)]
    return space, [ref.pack() for ref in taken if ref is not None]


def test_slots_rest_until_their_writer_ends_or_their_time_is_over() -> None:
    space, refs = with_slots(3)
    rest = Rest(space)
    rest.begin(7, refs[:1], 10.0)
    rest.begin(8, refs[1:], 20.0)
    rest.begin(9, [], 20.0)
    assert (rest.resting, rest.rests(7), rest.rests(9), rest.segments()) == (3, True, False, {0})
    rest.end(7)
    rest.tick(19.0)
    assert (rest.resting, space.segments[0].used) == (2, 2)
    rest.tick(20.0)
    assert (rest.resting, rest.segments(), space.segments[0].used) == (0, set(), 0)
    assert {(ref.segment, ref.slot) for ref in map(PageRef.unpack, refs)} == space.freed()


def test_a_clock_that_was_set_back_lets_nothing_rest_for_ever() -> None:
    space, refs = with_slots(1)
    rest = Rest(space)
    rest.begin(7, refs, 1000.0 + LIMBO_SECONDS)
    rest.tick(1.0)
    rest.tick(1.0 + LIMBO_SECONDS)
    assert rest.resting == 0


def test_what_is_in_quarantine_stays_until_it_is_all_that_is_left_of_its_segment() -> None:
    space, refs = with_slots(2)
    rest = Rest(space)
    rest.quarantine(refs[0])
    rest.forgive(0)
    assert (rest.quarantined, space.segments[0].used) == (1, 2)
    space.give_back(PageRef.unpack(refs[1]))
    rest.forgive(0)
    assert (rest.quarantined, space.segments[0].used) == (0, 0)


def test_another_process_goes_on() -> None:
    space, refs = with_slots(2)
    rest, successor = Rest(space), Rest(space)
    rest.begin(7, refs[:1], 10.0)
    rest.quarantine(refs[1])
    successor.resume(*rest.snapshot())
    assert successor.snapshot() == rest.snapshot()
    assert (successor.resting, successor.quarantined) == (1, 1)
