"""Slots: handed out once, from touched memory only, never with a generation that was seen before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.layout import PageRef, carve
from tests.pool.brain import PAGE, segment_for
from tests.pool.wrong_core import wrong_slots


def space_of(*held: int, touched: bool = True) -> SlotAllocator:
    slots = SlotAllocator([segment_for(count) for count in held])
    if touched:
        for segment in slots.segments:
            slots.touch(segment.number, segment.size)
    return slots


def take_all(slots: SlotAllocator, namespace: int = 0) -> list[PageRef]:
    return [PageRef.unpack(ref) for ref in slots.take(namespace, 100)]


def test_slots_are_handed_out_once_in_order() -> None:
    slots = space_of(3)
    assert slots.take(0, 1) == []
    slots.assign(slots.segments[0], 0, PAGE)
    taken = take_all(slots)
    assert [ref.slot for ref in taken] == [0, 1, 2]
    assert {ref.generation for ref in taken} == {taken[0].generation}


def test_a_slot_comes_back_with_a_new_generation() -> None:
    slots = space_of(2)
    slots.assign(slots.segments[0], 0, PAGE)
    first, _ = take_all(slots)
    slots.give_back(first.pack())
    (again,) = take_all(slots)
    assert (again.slot, again.generation) == (first.slot, first.generation + 1)
    with pytest.raises(ValueError, match="was given back twice"):
        slots.give_back(first.pack())
    assert wrong_slots(slots) == []


def test_generations_go_on_growing_when_a_segment_changes_hands() -> None:
    slots = space_of(4)
    segment = slots.segments[0]
    seen = 0
    for namespace, page in enumerate((PAGE, 2 * PAGE, PAGE, 4 * PAGE, 64)):
        slots.assign(segment, namespace, page)
        for _ in range(2):
            taken = take_all(slots, namespace)
            assert min(ref.generation for ref in taken) > seen
            seen = max(ref.generation for ref in taken)
            for ref in taken:
                slots.give_back(ref.pack())


def test_a_segment_with_slots_out_changes_no_hands() -> None:
    slots = space_of(2)
    slots.assign(slots.segments[0], 0, PAGE)
    slots.take(0, 1)
    with pytest.raises(ValueError, match="has 1 slots in use, expected none"):
        slots.assign(slots.segments[0], 1, PAGE)


def test_a_segment_that_changes_hands_takes_its_free_slots_along() -> None:
    slots = space_of(2, 2)
    for segment in slots.segments:
        slots.assign(segment, 0, PAGE)
    slots.assign(slots.segments[0], 1, PAGE)
    assert {ref.segment for ref in take_all(slots, 0)} == {1}
    assert {ref.segment for ref in take_all(slots, 1)} == {0}
    assert wrong_slots(slots) == []


@given(st.lists(st.integers(0, segment_for(5) + 100), max_size=8))
def test_slots_follow_the_touch(steps: list[int]) -> None:
    slots = space_of(5, touched=False)
    slots.assign(slots.segments[0], 0, PAGE)
    taken, reached = 0, 0
    for step in steps:
        slots.touch(0, step)
        reached = max(reached, min(step, segment_for(5)))
        taken += len(take_all(slots))
        assert taken == carve(segment_for(5), PAGE).slots_within(reached)
        assert wrong_slots(slots) == []


def test_the_most_touched_segment_is_taken_first_and_an_untouched_one_never() -> None:
    slots = space_of(2, 2, 2, touched=False)
    assert slots.unassigned(PAGE) is None
    slots.touch(1, segment_for(1))
    slots.touch(2, segment_for(2))
    chosen = slots.unassigned(PAGE)
    assert chosen is slots.segments[2]
    slots.assign(chosen, 0, PAGE)
    assert slots.unassigned(PAGE) is slots.segments[1]
    assert slots.unassigned(2 * PAGE) is None


def test_waiting_pays_only_while_memory_is_touched_that_one_could_have() -> None:
    slots = space_of(2, 2, touched=False)
    assert slots.untouched(0)
    slots.touch(0, segment_for(2))
    slots.assign(slots.segments[0], 0, PAGE)
    assert slots.untouched(0), "the other segment is nobody's yet"
    slots.touch(1, segment_for(1))
    slots.assign(slots.segments[1], 1, PAGE)
    assert not slots.untouched(0)
    assert slots.untouched(1)
    slots.touching_ended()
    assert not slots.untouched(1)
    assert slots.capacity(1) == 1


def test_check_sees_what_is_wrong() -> None:
    slots = space_of(2)
    slots.assign(slots.segments[0], 0, PAGE)
    slots.segments[0].used = 5
    assert wrong_slots(slots) == ["segment 0 lost slots: 5 used of 2"]
