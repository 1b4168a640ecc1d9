"""Slots that wait for their writers, and those that are not used again."""

from __future__ import annotations

from ems.pool.core.deferred_frees import REPLACE_SECONDS, DeferredFrees
from ems.pool.core.slot_allocator import SlotAllocator
from ems.pool.layout import PageRef, Writer
from tests.pool.brain import segment_for

PAGE = 8192
ONE, OTHER = Writer(7, 1, b"12345678", 4), Writer(7, 1, b"87654321", 4)


def with_slots(count: int) -> tuple[SlotAllocator, list[bytes]]:
    slots = SlotAllocator([segment_for(4, PAGE)])
    slots.touch(0, segment_for(4, PAGE))
    slots.assign(slots.segments[0], 0, PAGE)
    return slots, slots.take(0, count)


def test_slots_wait_until_their_writer_stops() -> None:
    slots, refs = with_slots(3)
    deferred = DeferredFrees(slots)
    deferred.defer(ONE, refs[:1], 10.0)
    deferred.defer(OTHER, refs[1:], 20.0)
    deferred.defer(Writer(9), [], 20.0)
    assert (deferred.resting, deferred.awaits(ONE), deferred.awaits(Writer(9))) == (3, True, False)
    assert (deferred.segments(), deferred.bytes_of(ONE.process)) == ({0}, 3 * PAGE)
    assert deferred.stopped(ONE) == 1
    assert (deferred.resting, slots.segments[0].used) == (2, 2)
    assert deferred.stopped(OTHER, refs[2:]) == 1
    assert (deferred.resting, deferred.bytes_of(ONE.process)) == (1, PAGE)
    assert deferred.stopped(OTHER) == 1
    assert (deferred.resting, deferred.segments(), deferred.bytes_of(ONE.process)) == (0, set(), 0)
    assert {(ref.segment, ref.slot) for ref in map(PageRef.unpack, refs)} == slots.freed()
    assert slots.segments[0].used == 0


def test_time_frees_nothing_and_says_whose_memory_is_to_be_replaced() -> None:
    slots, refs = with_slots(1)
    deferred = DeferredFrees(slots)
    deferred.defer(ONE, refs, 1000.0)
    assert deferred.overdue(1000.0 + REPLACE_SECONDS - 1) == []
    assert deferred.overdue(1000.0 + REPLACE_SECONDS) == [(0, 1)]
    assert deferred.overdue(5.0) == [], "the clock was set back"
    assert deferred.overdue(5.0 + REPLACE_SECONDS) == [(0, 1)]
    assert deferred.resting == 1


def test_what_waits_goes_with_its_memory_and_its_headers_say_so_no_more() -> None:
    slots, refs = with_slots(3)
    deferred = DeferredFrees(slots)
    deferred.defer(ONE, refs[:1], 1.0)
    deferred.quarantine(refs[1])
    assert not deferred.fills(0)
    slots.give_back(refs[2])
    assert deferred.fills(0)
    deferred.drop_segment(0)
    assert (deferred.resting, deferred.quarantined, slots.segments[0].used) == (0, 0, 0)
    assert slots.freed() == {PageRef.unpack(refs[2])[:2]}
    assert deferred.overdue(1e6) == []
