"""A namespace that is short of its share grows before it evicts pages of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.pool_core import PoolCore
from ems.pool.core.shares import Quota
from ems.pool.keys import split_keys
from ems.pool.names import MARK
from tests.pool.wrong_core import wrong_core

SEGMENT = 1 << 20
PAGE = 64 << 10


def store(core: PoolCore, namespace: int, count: int, seed: int) -> bytes:
    """Store ``count`` pages that hang on nothing, one reservation each, as far as there is room; their keys, joined."""
    keys = b"".join((seed * 10_000 + number).to_bytes(16, "big") for number in range(1, count + 1))
    for key in split_keys(keys):
        reserved = core.writing.reserve(1, namespace, bytes(16), [key])
        if reserved.granted:
            core.writing.commit(1, reserved.reservation)
    return keys


def test_the_high_watermark_does_not_hold_a_namespace_below_its_share() -> None:
    core = PoolCore([SEGMENT] * 8)
    for segment in range(8):
        core.slots.touch(segment, SEGMENT)
    core.slots.touching_ended()
    first = core.open_namespace("first", PAGE)
    second = core.open_namespace("second", PAGE + 4096)
    store(core, first, 8 * 15, 1)
    keys = store(core, second, 3 * 14, 2)

    present = sum(len(core.reading.lookup(1, second, [key], lease=False).pages) for key in split_keys(keys))

    assert present == 3 * 14
    assert wrong_core(core) == []


def test_no_page_leaves_while_another_namespace_has_segments_without_pages() -> None:
    core = PoolCore([SEGMENT] * 4)
    for segment in range(4):
        core.slots.touch(segment, SEGMENT)
    core.slots.touching_ended()
    emptied = core.open_namespace("emptied", PAGE)
    reserved = core.writing.reserve(1, emptied, bytes(16), [bytes([number]) * 16 for number in range(1, 57)])
    core.writing.abort(1, reserved.reservation)
    grows = core.open_namespace("grows", PAGE)
    keys = store(core, grows, 4 * 15 - 3, 2)

    present = sum(len(core.reading.lookup(1, grows, [key], lease=False).pages) for key in split_keys(keys))

    assert present == 4 * 15 - 3
    assert wrong_core(core) == []


def test_what_nobody_asked_for_leaves_each_other_namespace_a_segment() -> None:
    core = PoolCore([SEGMENT] * 4, high_watermark=1.0)
    for segment in range(4):
        core.slots.touch(segment, SEGMENT)
    core.slots.touching_ended()
    first, second = (core.open_namespace(name, PAGE) for name in ("first", "second"))
    space = core.namespaces.opened(first)
    assert core.reclaimer.idle_room(space) == 15
    store(core, second, 15, 1)
    store(core, first, 10, 2)
    assert core.reclaimer.idle_room(space) == 5 + 15
    store(core, second, 15, 3)
    assert core.reclaimer.idle_room(space) == 5, "the last segment is not taken before the other one needs it"


def test_nothing_leaves_soon_while_each_namespace_finds_a_segment_that_nobody_has() -> None:
    core = PoolCore([SEGMENT] * 4)
    for segment in range(4):
        core.slots.touch(segment, SEGMENT)
    core.slots.touching_ended()
    first, second = (core.open_namespace(name, PAGE) for name in ("first", "second"))

    def leaving() -> list[int]:
        return [namespace for namespace, _ in core.reclaimer.leaving_soon(1)]

    store(core, second, 1, 1)
    store(core, first, 15, 2)
    assert leaving() == [], "it finds one more, and the other one after it"
    store(core, first, 15, 3)
    assert leaving() == [first], "the last segment may go to the other one at any moment"
    store(core, second, 15, 4)
    assert leaving() == [first]
    assert core.reclaimer.evicted == 0


def test_what_nobody_asked_for_finds_no_room_in_memory_that_is_being_touched() -> None:
    """What is not there yet would be made of what is."""
    core = PoolCore([SEGMENT] * 2, high_watermark=1.0)
    core.slots.touch(0, SEGMENT)
    space = core.namespaces.opened(core.open_namespace("first", PAGE))
    assert core.reclaimer.idle_room(space) == 0
    core.slots.touch(1, SEGMENT)
    assert core.reclaimer.idle_room(space) == 15


steps = st.tuples(st.sampled_from(["store", "copy", "touch"]), st.integers(0, 2), st.integers(1, 15))


@pytest.mark.parametrize("limited", [False, True])
@given(todo=st.lists(steps, max_size=30))
def test_what_nobody_asked_for_makes_no_page_leave(todo: list[tuple[str, int, int]], *, limited: bool) -> None:
    """Whatever was touched, stored and copied before; by tenants with quotas, too."""
    core, touched = PoolCore([SEGMENT] * 5), 0
    if limited:
        core.set_quotas({"a": Quota("20%", "40%"), "b": Quota("20%", "80%")})
    names = [f"{MARK}a/one", f"{MARK}b/two", f"{MARK}b/three"]
    spaces = [core.open_namespace(name, PAGE) for name in names]
    for number, (step, at, count) in enumerate(todo):
        if step == "touch":
            core.slots.touch(touched % 5, SEGMENT if number % 2 else SEGMENT // 2)
            touched += 1
        elif step == "store":
            store(core, spaces[at], count, number)
        else:
            room, before = core.reclaimer.idle_room(core.namespaces.opened(spaces[at])), core.reclaimer.evicted
            keys = [(number * 10_000 + 5_000 + page).to_bytes(16, "big") for page in range(min(count, room))]
            reserved = core.writing.reserve(1, spaces[at], bytes(16), keys)
            assert len(reserved.granted) == len(keys)
            assert core.reclaimer.evicted == before
            if keys:
                core.writing.commit(1, reserved.reservation)
    assert wrong_core(core) == []
