"""A state that does not hold together is noticed before a process believes it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from ems.pool.core.handover import CoreState, IndexState
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.soundness import faults
from ems.pool.segments.layout import REF_BYTES, PageRef
from tests.pool.brain import chain, segment_for

PAGE = 8192


def state() -> CoreState:
    core = PoolCore([segment_for(6, PAGE)] * 2, high_watermark=1.0)
    for segment in range(2):
        core.touched(segment, segment_for(6, PAGE))
    core.touching_ended()
    for name in "ab":
        number = core.open_namespace(name, PAGE)
        core.commit(1, core.reserve(1, number, bytes(16), chain(name, 4)).reservation)
    core.reserve(1, 0, bytes(16), chain("w", 1))
    core.disconnect(1, 0.0, alive=True)
    return core.snapshot()


def with_index(whole: CoreState, change: Callable[[IndexState], IndexState]) -> CoreState:
    first = whole.namespaces[0]
    changed = msgspec.structs.replace(first, index=change(first.index))
    return msgspec.structs.replace(whole, namespaces=[changed, *whole.namespaces[1:]])


def with_ref(whole: CoreState, ref: bytes) -> CoreState:
    return with_index(whole, lambda index: msgspec.structs.replace(index, refs=ref + index.refs[REF_BYTES:]))


def test_a_state_as_it_is_holds_together() -> None:
    assert faults(state()) == []


def test_a_page_too_few_and_one_too_many_are_noticed() -> None:
    whole = state()
    less = with_index(whole, lambda one: msgspec.structs.replace(one, refs=one.refs[REF_BYTES:]))
    assert "does not account for all of its pages" in faults(less)[0]
    more = with_index(whole, lambda one: msgspec.structs.replace(one, present=5))
    assert "does not account for all of its pages" in faults(more)[0]


def test_two_pages_in_one_slot_are_noticed() -> None:
    whole = state()
    index = whole.namespaces[0].index
    assert faults(with_ref(whole, index.refs[REF_BYTES : 2 * REF_BYTES])) == ["a slot is in two places"]


def test_a_page_in_a_free_slot_is_noticed() -> None:
    whole = state()
    entry = int.from_bytes(whole.free[0][:8], "little")
    first = PageRef.unpack(whole.namespaces[0].index.refs[:REF_BYTES])
    free = first._replace(slot=entry & 0xFFFFFFFF)
    assert "a slot is in two places" in faults(with_ref(whole, free.pack()))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ref: ref._replace(segment=1), "which is not its own"),
        (lambda ref: ref._replace(segment=9), "which is not its own"),
        (lambda ref: ref._replace(generation=ref.generation + 1), "of another generation"),
        (lambda ref: ref._replace(slot=ref.slot + 1000), "of another generation"),
    ],
    ids=["another's segment", "no segment", "another generation", "no slot"],
)
def test_a_page_where_it_cannot_be_is_noticed(change: Callable[[PageRef], PageRef], told: str) -> None:
    whole = state()
    ref = change(PageRef.unpack(whole.namespaces[0].index.refs[:REF_BYTES]))
    assert told in faults(with_ref(whole, ref.pack()))[0]


def test_a_page_of_another_generation_is_noticed_in_each_segment() -> None:
    whole = state()
    for number, segment in enumerate(whole.segments):
        other = msgspec.structs.replace(segment, generations=bytes(len(segment.generations)))
        segments = [other if one is segment else one for one in whole.segments]
        assert faults(msgspec.structs.replace(whole, segments=segments)) == [
            f"a page of segment {number} is of another generation than its slot"
        ]


def test_a_slot_that_nobody_knows_of_is_noticed() -> None:
    whole = msgspec.structs.replace(state(), limbo={})
    assert "lost slots" in faults(whole)[0]


def test_a_quarantined_slot_that_does_not_exist_is_noticed() -> None:
    whole = msgspec.structs.replace(state(), quarantined=[PageRef(7, 0, 1, 0).pack()])
    assert "which does not exist" in faults(whole)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: msgspec.structs.replace(one, keys=one.keys[:16] * 4 + one.keys[64:]),
        lambda one: msgspec.structs.replace(one, tails=[(bytes(16), bytes(16), bytes(8))]),
    ],
    ids=["a key twice", "a tail of no page"],
)
def test_what_the_check_leaves_out_the_brain_finds(change: Callable[[IndexState], IndexState]) -> None:
    broken = with_index(state(), change)
    successor = PoolCore([segment_for(6, PAGE)] * 2)
    with pytest.raises((ValueError, LookupError)):
        successor.resume(broken)
