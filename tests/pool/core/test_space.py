"""Slots: handed out once, from touched memory only, never with a generation that was seen before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.space import Space
from ems.pool.segments.layout import PageRef, carve
from tests.pool.brain import PAGE, segment_for


def space_of(*slots: int, touched: bool = True) -> Space:
    space = Space([segment_for(count) for count in slots])
    if touched:
        for segment in space.segments:
            space.touch(segment.number, segment.size)
    return space


def take_all(space: Space, namespace: int = 0) -> list[PageRef]:
    taken = []
    while (ref := space.take(namespace)) is not None:
        taken.append(ref)
    return taken


def test_slots_are_handed_out_once_in_order() -> None:
    space = space_of(3)
    assert space.take(0) is None
    space.assign(space.segments[0], 0, PAGE)
    taken = take_all(space)
    assert [ref.slot for ref in taken] == [0, 1, 2]
    assert {ref.generation for ref in taken} == {taken[0].generation}
    assert [ref.offset for ref in taken] == [carve(segment_for(3), PAGE).slot_offset(slot) for slot in range(3)]


def test_a_slot_comes_back_with_a_new_generation() -> None:
    space = space_of(2)
    space.assign(space.segments[0], 0, PAGE)
    first, _ = take_all(space)
    space.give_back(first)
    (again,) = take_all(space)
    assert (again.slot, again.generation) == (first.slot, first.generation + 1)
    with pytest.raises(ValueError, match="was given back twice"):
        space.give_back(first)
    assert space.check() == []


def test_generations_go_on_growing_when_a_segment_changes_hands() -> None:
    space = space_of(4)
    segment = space.segments[0]
    seen = 0
    for namespace, page in enumerate((PAGE, 2 * PAGE, PAGE, 4 * PAGE, 64)):
        space.assign(segment, namespace, page)
        for _ in range(2):
            taken = take_all(space, namespace)
            assert min(ref.generation for ref in taken) > seen
            seen = max(ref.generation for ref in taken)
            for ref in taken:
                space.give_back(ref)


def test_a_segment_with_slots_out_changes_no_hands() -> None:
    space = space_of(2)
    space.assign(space.segments[0], 0, PAGE)
    space.take(0)
    with pytest.raises(ValueError, match="has 1 slots in use, expected none"):
        space.assign(space.segments[0], 1, PAGE)


def test_a_segment_that_changes_hands_takes_its_free_slots_along() -> None:
    space = space_of(2, 2)
    for segment in space.segments:
        space.assign(segment, 0, PAGE)
    space.assign(space.segments[0], 1, PAGE)
    assert {ref.segment for ref in take_all(space, 0)} == {1}
    assert {ref.segment for ref in take_all(space, 1)} == {0}
    assert space.check() == []


@given(st.lists(st.integers(0, segment_for(5) + 100), max_size=8))
def test_slots_follow_the_touch(steps: list[int]) -> None:
    space = space_of(5, touched=False)
    space.assign(space.segments[0], 0, PAGE)
    taken, reached = 0, 0
    for step in steps:
        space.touch(0, step)
        reached = max(reached, min(step, segment_for(5)))
        taken += len(take_all(space))
        assert taken == carve(segment_for(5), PAGE).slots_within(reached)
        assert space.check() == []


def test_the_most_touched_segment_is_taken_first_and_an_untouched_one_never() -> None:
    space = space_of(2, 2, 2, touched=False)
    assert space.unassigned(PAGE) is None
    space.touch(1, segment_for(1))
    space.touch(2, segment_for(2))
    chosen = space.unassigned(PAGE)
    assert chosen is space.segments[2]
    space.assign(chosen, 0, PAGE)
    assert space.unassigned(PAGE) is space.segments[1]
    assert space.unassigned(2 * PAGE) is None


def test_waiting_pays_only_while_memory_is_touched_that_one_could_have() -> None:
    space = space_of(2, 2, touched=False)
    assert space.untouched(0)
    space.touch(0, segment_for(2))
    space.assign(space.segments[0], 0, PAGE)
    assert space.untouched(0), "the other segment is nobody's yet"
    space.touch(1, segment_for(1))
    space.assign(space.segments[1], 1, PAGE)
    assert not space.untouched(0)
    assert space.untouched(1)
    space.touching_ended()
    assert not space.untouched(1)
    assert space.capacity(1) == 1


def test_idle_segments_of_others_are_found_if_they_have_room() -> None:
    space = space_of(1, 1)
    for number, segment in enumerate(space.segments):
        space.assign(segment, number, PAGE)
    assert space.idle_of_others(0, PAGE) is space.segments[1]
    assert space.idle_of_others(0, 4 * PAGE) is None
    space.take(1)
    assert space.idle_of_others(0, PAGE) is None
    assert space.idle_of_others(1, PAGE) is space.segments[0]


def test_check_sees_what_is_wrong() -> None:
    space = space_of(2)
    space.assign(space.segments[0], 0, PAGE)
    space.segments[0].used = 5
    assert space.check() == ["segment 0 lost slots: 5 used of 2"]
