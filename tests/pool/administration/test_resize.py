"""More and fewer segments while the pool is in use: what is read stays, what leaves had to."""

from __future__ import annotations

from typing import Any

import pytest

from ems.errors import PoolRefused
from ems.pool.administration.passes import RETRY_SECONDS
from ems.pool.administration.resize import Shrinking, plan
from ems.pool.administration.service import MAX_RUNNING, AdminService
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.shares import Quota
from ems.pool.protocol.acts import CancelResize, Clear, Follow, Resize
from ems.pool.reasons.words import Reason
from tests.pool.brain import PAGE, chain, core_of, key, present, save, segment_for
from tests.pool.wrong_core import wrong_core

SIZE = segment_for(2)


def run(service: AdminService, report: dict[str, Any]) -> dict[str, Any]:
    now = 0.0
    while not report["done"]:
        carry_out(service)
        now += RETRY_SECONDS
        service.step(now)
        report = service.do(Follow(report["job"]), now)
    return report


def carry_out(service: AdminService) -> None:
    while service.given_up:
        service.freed(service.given_up.pop(0))


def filled(segments: int = 4) -> tuple[PoolCore, AdminService, int]:
    core = core_of(*[2] * segments)
    return core, AdminService(core), core.open_namespace("a", PAGE)


def test_more_segments_are_had_and_used_once_they_were_touched() -> None:
    core, service, slots = filled(1)
    save(core, slots, chain("x", 2))
    report = service.do(Resize(3 * SIZE), 0.0)
    assert (report["added"], report["taken"], report["bytes"], report["done"]) == (2, 0, 3 * SIZE, True)
    assert [(number, core.slots.segments[number].size) for number in service.added] == [(1, SIZE), (2, SIZE)]
    for number in service.added:
        core.slots.touch(number, SIZE)
    save(core, slots, chain("y", 4))
    assert len(present(core, slots, [*chain("x", 2), *chain("y", 4)])) == 6
    assert wrong_core(core) == []


def test_segments_that_hold_nothing_go_first() -> None:
    core, service, slots = filled(4)
    save(core, slots, chain("x", 3))
    report = service.do(Resize(2 * SIZE), 0.0, dry_run=True)
    assert (report["taken"], report["removed"]) == (2, 0)
    assert core.stats()["bytes_total"] == 4 * SIZE
    report = run(service, service.do(Resize(2 * SIZE), 0.0))
    assert report["removed"] == 0
    assert len(present(core, slots, chain("x", 3))) == 3
    assert core.stats()["bytes_total"] == 2 * SIZE
    assert wrong_core(core) == []


def test_what_lay_in_a_segment_that_goes_leaves_with_what_hangs_on_it() -> None:
    core, service, slots = filled(2)
    save(core, slots, chain("x", 2))
    save(core, slots, [key("alone")])
    save(core, slots, chain("x", 3)[2:], parent=chain("x", 2)[1])
    report = run(service, service.do(Resize(SIZE), 0.0))
    left = present(core, slots, [*chain("x", 3), key("alone")])
    assert report["removed"] == 4 - len(left)
    assert set(left) in ({key("alone")}, set(chain("x", 2)), {key("alone"), *chain("x", 3)[2:]})
    gone = next(one for one in [*chain("x", 3), key("alone")] if one not in left)
    assert Reason.of_code(core.reading.lookup(1, slots, [gone], lease=False).code) is Reason.EVICTED_RESIZE
    assert wrong_core(core) == []


def test_a_page_that_is_read_keeps_its_segment_until_it_is_released() -> None:
    core, service, slots = filled(2)
    save(core, slots, chain("x", 4))
    found = core.reading.lookup(1, slots, chain("x", 4), lease=True)
    report = service.do(Resize(SIZE), 0.0)
    for now in range(100):
        service.step(float(now))
    assert not service.do(Follow(report["job"]), 0.0)["done"]
    assert not service.given_up
    assert wrong_core(core) == []
    with pytest.raises(PoolRefused, match="being resized"):
        service.do(Resize(2 * SIZE), 0.0)
    core.reading.release(1, found.lease)
    assert run(service, report)["done"]
    assert core.stats()["segments_assigned"] == 1
    assert wrong_core(core) == []


def test_what_is_being_written_is_let_finish() -> None:
    core, service, slots = filled(2)
    reserved = core.writing.reserve(1, slots, bytes(16), chain("x", 4))
    report = service.do(Resize(SIZE), 0.0)
    service.step(1.0)
    core.writing.commit(1, reserved.reservation)
    assert run(service, report)["removed"] >= 2
    assert wrong_core(core) == []


def test_a_segment_that_was_given_up_comes_back_with_new_generations() -> None:
    core, service, slots = filled(2)
    save(core, slots, chain("x", 4))
    before = max(max(segment.generations) for segment in core.slots.segments)
    run(service, service.do(Resize(SIZE), 0.0))
    service.do(Resize(2 * SIZE), 0.0)
    (added,) = service.added
    assert added in (0, 1)
    core.slots.touch(added, SIZE)
    save(core, slots, chain("y", 4))
    assert len(present(core, slots, chain("y", 4))) == 4
    assert min(core.slots.segments[added].generations) > before - 1
    assert wrong_core(core) == []


def test_the_pool_keeps_one_segment_and_takes_no_memory_that_is_not_there() -> None:
    core, service, _ = filled(3)
    assert plan(core.slots.segments, 2 * SIZE - 1).segments == 1
    for size in (1, SIZE - 1):
        with pytest.raises(PoolRefused, match="a segment has as much"):
            service.do(Resize(size), 0.0)
    service.free_bytes = lambda: SIZE
    assert service.do(Resize(5 * SIZE), 0.0, dry_run=True)["added"] == 2
    with pytest.raises(PoolRefused, match="free"):
        service.do(Resize(5 * SIZE), 0.0)
    assert core.stats()["bytes_total"] == 3 * SIZE


def test_a_pool_too_small_for_the_minima_is_refused_before_anything_leaves() -> None:
    core, service, _ = filled(4)
    core.set_quotas({"ann": Quota(minimum=str(SIZE)), "bob": Quota(minimum=str(2 * SIZE))})
    for dry_run in (True, False):
        with pytest.raises(PoolRefused, match="guaranteed minima"):
            service.do(Resize(2 * SIZE), 0.0, dry_run=dry_run)
    assert core.stats()["bytes_total"] == 4 * SIZE
    assert not service.passes
    assert run(service, service.do(Resize(3 * SIZE), 0.0))["done"]


def test_segments_that_lost_their_memory_count_and_cannot_be_given_up() -> None:
    core, service, slots = filled(4)
    save(core, slots, chain("x", 2))
    for number in (0, 1, 2, 3):
        if not core.slots.segments[number].used:
            core.reclaimer.lose(number)
    lost = [one.number for one in core.slots.segments if one.closing]
    assert len(lost) == 3
    assert service.do(Resize(5 * SIZE), 0.0, dry_run=True)["added"] == 1
    with pytest.raises(PoolRefused, match="3 segments wait for memory"):
        service.do(Resize(SIZE), 0.0)
    run(service, service.do(Resize(3 * SIZE), 0.0))
    assert [bool(one.size) for one in core.slots.segments].count(True) == 3
    for number in lost:
        core.slots.regain(number)
        core.slots.touch(number, SIZE)
    save(core, slots, chain("y", 6))
    assert len(present(core, slots, chain("y", 6))) == 6
    assert wrong_core(core) == []


def test_a_pool_all_of_whose_segments_lost_their_memory_is_resized_or_says_why_not() -> None:
    core, service, _ = filled(2)
    core.reclaimer.lose(0)
    core.reclaimer.lose(1)
    with pytest.raises(PoolRefused, match="2 segments wait for memory in the place of what was taken from them"):
        service.do(Resize(SIZE), 0.0)
    assert service.do(Resize(2 * SIZE), 0.0)["added"] == 0
    assert service.do(Resize(3 * SIZE), 0.0)["added"] == 1
    core.slots.touch(2, SIZE)
    slots = core.open_namespace("b", PAGE)
    save(core, slots, chain("y", 2))
    assert wrong_core(core) == []


def test_a_suffix_that_comes_while_its_prefixes_wait_to_leave_goes_first() -> None:
    core = core_of(3, 3, 3)
    service, slots = AdminService(core), core.open_namespace("a", PAGE)
    x = chain("x", 4)
    save(core, slots, chain("y", 3))
    save(core, slots, x[:3])
    late = core.writing.reserve(7, slots, x[2], x[3:])
    report = service.do(Resize(segment_for(3)), 0.0)
    core.writing.commit(7, late.reservation)
    now = 0.0
    for _ in range(20):
        now += RETRY_SECONDS
        carry_out(service)
        service.step(now)
    report = service.do(Follow(report["job"]), now)
    assert (report["done"], report["removed"]) == (True, 4)
    assert len(present(core, slots, chain("y", 3))) == 3
    assert wrong_core(core) == []


@pytest.mark.parametrize("segments", [1, 4])
def test_a_change_of_size_that_is_refused_changes_nothing(segments: int) -> None:
    core, service, slots = filled(2)
    save(core, slots, chain("x", 1))
    core.reading.lookup(9, slots, chain("x", 1), lease=True)
    for _ in range(MAX_RUNNING):
        assert not service.do(Clear(everything=True), 0.0)["done"]
    with pytest.raises(PoolRefused, match="8 passes are running"):
        service.do(Resize(segments * SIZE), 0.0)
    assert (service.added, service.given_up) == ([], [])
    assert [(one.size, one.closing) for one in core.slots.segments] == [(SIZE, False)] * 2


def stuck(segments: int) -> tuple[PoolCore, AdminService, int, int, dict[str, Any]]:
    """A pool that was full and becomes one segment, while one page in a segment that is to go is read."""
    core, service, slots = filled(segments)
    for number in range(2 * segments):
        save(core, slots, [key(number)])
    going = plan(core.slots.segments, SIZE).give_up
    page = next(page for page in core.namespaces[slots].index if page.segment == going[0])
    lease = core.reading.lookup(7, slots, [page.key], lease=True).lease
    report = service.do(Resize(SIZE), 0.0)
    for step in range(20):
        carry_out(service)
        service.step(step * RETRY_SECONDS)
    return core, service, slots, lease, service.do(Follow(report["job"]), 1.0)


def test_a_page_that_is_read_holds_its_own_segment_and_no_other() -> None:
    core, service, _, lease, report = stuck(6)
    assert (report["done"], report["emptying"], report["removed"]) == (False, 1, 9)
    assert report["held_by"] == [{"client_id": 7, "leases": 1, "reservations": 0, "pages": 1}]
    assert core.stats()["bytes_total"] == 2 * SIZE
    core.reading.release(7, lease)
    report = run(service, report)
    assert (report["done"], report["held_by"], core.stats()["bytes_total"]) == (True, [], SIZE)
    assert core.stats()["segments"] == 1
    assert wrong_core(core) == []


def test_a_change_of_size_can_be_cancelled() -> None:
    core, service, slots, lease, report = stuck(6)
    assert service.do(CancelResize(), 1.0, dry_run=True)["kept"] == 1
    cancelled = service.do(CancelResize(), 1.0)
    assert (cancelled["kept"], cancelled["segments"], cancelled["bytes"]) == (1, 2, 2 * SIZE)
    assert wrong_core(core) == []
    assert not any(segment.closing for segment in core.slots.segments)
    service.step(2.0)
    assert service.do(Follow(report["job"]), 2.0)["done"]
    with pytest.raises(PoolRefused, match="nothing to cancel"):
        service.do(CancelResize(), 2.0)
    core.reading.release(7, lease)
    new = [key(("new", number)) for number in range(4)]
    save(core, slots, new)
    assert len(present(core, slots, new)) == 4, "all slots of what stayed are handed out again"
    assert wrong_core(core) == []
    assert run(service, service.do(Resize(SIZE), 3.0))["done"]


@pytest.mark.parametrize("touched", [True, False])
def test_segments_come_back_as_they_were_when_nothing_had_happened(touched: bool) -> None:
    core = core_of(2, 2, 2, touched=touched)
    service, slots = AdminService(core), core.open_namespace("a", PAGE)
    for number in range(3):
        core.slots.touch(number, SIZE)
    reserved = core.writing.reserve(1, slots, bytes(16), chain("x", 6))
    service.do(Resize(SIZE), 0.0)
    core.writing.abort(1, reserved.reservation)
    service.do(CancelResize(), 0.0)
    assert wrong_core(core) == []
    save(core, slots, chain("y", 6))
    assert len(present(core, slots, chain("y", 6))) == 6
    assert core.stats()["bytes_total"] == 3 * SIZE


def test_a_long_chain_that_is_read_costs_no_more_than_its_length() -> None:
    core = core_of(400, 400)
    service, slots = AdminService(core), core.open_namespace("a", PAGE)
    save(core, slots, chain("x", 600))
    lease = core.reading.lookup(7, slots, chain("x", 600), lease=True).lease
    report = service.do(Resize(segment_for(400)), 0.0)
    while service.step(0.0):
        pass
    core.reading.release(7, lease)
    steps = 1
    while not service.do(Follow(report["job"]), 1.0)["done"]:
        carry_out(service)
        service.step(1.0)
        steps += 1
        assert steps < 20
    assert wrong_core(core) == []


def test_a_clock_that_is_set_back_keeps_no_change_waiting() -> None:
    core, given_up = core_of(4, 4), list[int]()
    namespace = core.open_namespace("a", PAGE)
    keys = chain("x", 8)
    assert save(core, namespace, keys).granted
    leased = core.reading.lookup(1, namespace, keys, lease=True)
    shrinking = Shrinking(core, (0,), given_up)
    for _ in range(3):
        shrinking.step(1e6)
    assert given_up == []
    core.reading.release(1, leased.lease)
    core.settle()
    for _ in range(3):
        shrinking.step(0.0)
    assert given_up == [0]
