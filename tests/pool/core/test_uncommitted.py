"""What writers hold and have not committed: how much of a pool, and for how long."""

from __future__ import annotations

import pytest

from ems.errors import StaleReference
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.reservations import LIMITS, UncommittedLimits
from ems.pool.core.shares import Quota
from ems.pool.core.writing import Begun
from ems.pool.layout import Writer, writer_of
from ems.pool.reasons.words import Reason
from tests.pool.brain import chain, present, save, segment_for
from tests.pool.wrong_core import wrong_core

PAGE = 4096
SLOTS = 1000
HALF = SLOTS // 2 + 10
"""Half of a pool's bytes, in pages: it has headers, too."""
GIB = 1 << 30


def filled() -> tuple[PoolCore, int, list[bytes]]:
    """A pool that is full of somebody's pages."""
    size = segment_for(SLOTS, PAGE)
    core = PoolCore([size], high_watermark=1.0)
    core.slots.touch(0, size)
    core.slots.touching_ended()
    namespace = core.open_namespace("a", PAGE)
    keys = chain("others", SLOTS)
    for first in range(0, SLOTS, 100):
        save(core, namespace, keys[first : first + 100], keys[first - 1] if first else bytes(16), client_id=9)
    assert core.pages() == SLOTS
    return core, namespace, keys


def test_one_client_cannot_evict_a_namespace_and_store_nothing() -> None:
    core, namespace, keys = filled()
    granted = 0
    for attempt in range(50):
        reserved = core.writing.reserve(1, namespace, bytes(16), chain(f"mine {attempt}", 100))
        granted += len(reserved.granted)
    assert 0 < granted <= HALF
    assert core.counters.refused_share == 5000 - granted
    assert len(present(core, namespace, keys)) >= SLOTS // 2 - 60, "an eviction frees a few more than are wanted"
    before = core.pages()
    core.writing.reserve(1, namespace, bytes(16), chain("more", 100))
    assert core.pages() == before, "what is refused makes nothing leave"
    assert core.reading.explain("a", chain("more", 1)).codes[0] == Reason.REFUSED_SHARE.code
    assert core.writing.reserve(2, namespace, bytes(16), chain("another's", 10)).granted, (
        "others are not refused for that"
    )


@pytest.mark.parametrize("alive", [True, False])
def test_leaving_and_coming_back_gives_no_other_share(*, alive: bool) -> None:
    core, namespace, _ = filled()
    granted = 0
    for client_id in range(10, 60):
        core.writers[client_id] = Writer(4711, 1, client_id.to_bytes(8, "little"), 1)
        granted = max(
            granted, len(core.writing.reserve(client_id, namespace, bytes(16), chain(str(client_id), 900)).granted)
        )
        core.disconnect(client_id, 0.0, alive=alive)
    assert granted <= HALF
    assert core.pages() >= SLOTS // 2 - 60


def test_many_processes_together_have_a_share_too() -> None:
    core, namespace, _ = filled()
    granted = sum(
        len(core.writing.reserve(client_id, namespace, bytes(16), chain(str(client_id), 100)).granted)
        for client_id in range(10, 60)
    )
    assert HALF < granted <= HALF + SLOTS // 4 + 10
    assert core.pages() >= SLOTS // 4 - 60


def test_the_share_is_of_a_tenants_cap() -> None:
    size = segment_for(SLOTS, PAGE)
    core = PoolCore([size, size, size, size], high_watermark=1.0)
    for segment in range(4):
        core.slots.touch(segment, size)
    core.slots.touching_ended()
    core.set_quotas({"red": Quota(minimum="0", cap="25%")})
    namespace = core.open_namespace("//red/a", PAGE)
    assert len(core.writing.reserve(1, namespace, bytes(16), chain("x", 2000)).granted) <= HALF


def test_a_reservation_ends_and_its_slots_wait_for_their_writer() -> None:
    core, namespace, _ = filled()
    kept = core.writing.reserve(1, namespace, bytes(16), chain("kept", 2))
    core.tick(LIMITS.seconds - 1)
    late = core.writing.reserve(1, namespace, bytes(16), chain("late", 2))
    core.tick(LIMITS.seconds)
    assert core.counters.reservations_expired == 1
    with pytest.raises(StaleReference):
        core.writing.commit(1, kept.reservation)
    assert core.stats()["slots_resting"] == 2
    core.writing.commit(1, late.reservation)
    assert core.reading.lookup(2, namespace, chain("kept", 2), lease=False).pending == 0
    assert core.deferred.stopped(writer_of(1)) == 2
    assert core.stats()["slots_resting"] == core.stats()["bytes_reserved"] == 0
    assert wrong_core(core) == []


def test_what_goes_on_a_reservation_that_ended_meanwhile_takes_no_slot() -> None:
    """A node that was stopped between two steps of a long request."""
    core, namespace, _ = filled()
    keys = chain("long", 6)
    begun = core.writing.reserve(1, namespace, bytes(16), keys[:3])
    core.tick(LIMITS.seconds)
    with pytest.raises(StaleReference):
        core.writing.reserve(1, namespace, keys[2], keys[3:], (), Begun(begun.reservation, 3))
    assert wrong_core(core) == []
    assert [core.page(namespace, key) for key in keys] == [None] * 6


def test_a_clock_that_was_set_back_keeps_no_reservation_for_ever() -> None:
    core, namespace, _ = filled()
    core.tick(1e6)
    core.writing.reserve(1, namespace, bytes(16), chain("x", 2))
    core.tick(0.0)
    core.tick(LIMITS.seconds)
    assert core.counters.reservations_expired == 1


def test_what_tiers_bring_up_is_bounded_by_them() -> None:
    core, namespace, _ = filled()
    assert len(core.writing.reserve(-2, namespace, bytes(16), chain("up", 900)).granted) == 900
    core.tick(1e9)
    assert core.counters.reservations_expired == 0


@pytest.mark.parametrize(
    ("pool", "page", "one", "together"),
    [
        (64 * GIB, 64 << 10, 16 * GIB, 32 * GIB),
        (GIB, 1 << 20, GIB // 2, 3 * GIB // 4),
        (16 << 20, 4096, 8 << 20, 12 << 20),
        (1 << 20, 64 << 10, 4 << 20, 4 << 20),
    ],
    ids=["a quarter of a large pool", "a step of an engine", "half of a small pool", "a tiny pool"],
)
def test_how_much_may_be_held(pool: int, page: int, one: int, together: int) -> None:
    assert (LIMITS.of_process(pool, page), LIMITS.of_tenant(pool, page)) == (one, together)
    assert UncommittedLimits(seconds=1.0).seconds == 1.0
