"""More and fewer segments while the pool is in use: what is read stays, what leaves had to."""

from __future__ import annotations

from typing import Any

import pytest

from ems.errors import PoolRefused
from ems.pool.administration.acts import Clear, Drain, Follow, List, Pin, Resize
from ems.pool.administration.desk import MAX_RUNNING, Desk
from ems.pool.administration.passes import RETRY_SECONDS
from ems.pool.administration.resize import plan
from ems.pool.core.pool_core import PoolCore
from ems.pool.reasons.words import Reason
from ems.pool.tenants.quota import Quota
from tests.pool.brain import PAGE, chain, core_of, key, present, save, segment_for

SIZE = segment_for(2)


def run(desk: Desk, report: dict[str, Any]) -> dict[str, Any]:
    now = 0.0
    while not report["done"]:
        carry_out(desk)
        now += RETRY_SECONDS
        desk.step(now)
        report = desk.do(Follow(report["job"]), now)
    return report


def carry_out(desk: Desk) -> None:
    while desk.effects:
        effect = desk.effects.pop(0)
        if not effect.size:
            desk.freed(effect.segment)


def filled(segments: int = 4) -> tuple[PoolCore, Desk, int]:
    core = core_of(*[2] * segments)
    return core, Desk(core), core.open_namespace("a", PAGE)


def test_more_segments_are_had_and_used_once_they_were_touched() -> None:
    core, desk, space = filled(1)
    save(core, space, chain("x", 2))
    report = desk.do(Resize(3 * SIZE), 0.0)
    assert (report["added"], report["taken"], report["bytes"], report["done"]) == (2, 0, 3 * SIZE, True)
    assert [(effect.segment, effect.size) for effect in desk.effects] == [(1, SIZE), (2, SIZE)]
    for effect in desk.effects:
        core.touched(effect.segment, SIZE)
    save(core, space, chain("y", 4))
    assert len(present(core, space, [*chain("x", 2), *chain("y", 4)])) == 6
    assert core.check() == []


def test_segments_that_hold_nothing_go_first() -> None:
    core, desk, space = filled(4)
    save(core, space, chain("x", 3))
    report = desk.do(Resize(2 * SIZE), 0.0, dry_run=True)
    assert (report["taken"], report["removed"]) == (2, 0)
    assert core.stats()["bytes_total"] == 4 * SIZE
    report = run(desk, desk.do(Resize(2 * SIZE), 0.0))
    assert report["removed"] == 0
    assert len(present(core, space, chain("x", 3))) == 3
    assert core.stats()["bytes_total"] == 2 * SIZE
    assert core.check() == []


def test_what_lay_in_a_segment_that_goes_leaves_with_what_hangs_on_it() -> None:
    core, desk, space = filled(2)
    save(core, space, chain("x", 2))
    save(core, space, [key("alone")])
    save(core, space, chain("x", 3)[2:], parent=chain("x", 2)[1])
    report = run(desk, desk.do(Resize(SIZE), 0.0))
    left = present(core, space, [*chain("x", 3), key("alone")])
    assert report["removed"] == 4 - len(left)
    assert set(left) in ({key("alone")}, set(chain("x", 2)), {key("alone"), *chain("x", 3)[2:]})
    gone = next(one for one in [*chain("x", 3), key("alone")] if one not in left)
    assert Reason.of_code(core.lookup(1, space, [gone], lease=False).code) is Reason.EVICTED_RESIZE
    assert core.check() == []


def test_a_page_that_is_read_keeps_its_segment_until_it_is_released() -> None:
    core, desk, space = filled(2)
    save(core, space, chain("x", 4))
    found = core.lookup(1, space, chain("x", 4), lease=True)
    report = desk.do(Resize(SIZE), 0.0)
    for now in range(100):
        desk.step(float(now))
    assert not desk.do(Follow(report["job"]), 0.0)["done"]
    assert not desk.effects
    assert core.check() == []
    with pytest.raises(PoolRefused, match="being resized"):
        desk.do(Resize(2 * SIZE), 0.0)
    core.release(1, found.lease)
    assert run(desk, report)["done"]
    assert core.stats()["segments_assigned"] == 1
    assert core.check() == []


def test_what_is_being_written_is_let_finish() -> None:
    core, desk, space = filled(2)
    reserved = core.reserve(1, space, bytes(16), chain("x", 4))
    report = desk.do(Resize(SIZE), 0.0)
    desk.step(1.0)
    core.commit(1, reserved.reservation)
    assert run(desk, report)["removed"] >= 2
    assert core.check() == []


def test_a_segment_that_was_given_up_comes_back_with_new_generations() -> None:
    core, desk, space = filled(2)
    save(core, space, chain("x", 4))
    before = max(max(segment.generations) for segment in core.space.segments)
    run(desk, desk.do(Resize(SIZE), 0.0))
    desk.do(Resize(2 * SIZE), 0.0)
    (effect,) = desk.effects
    assert effect.segment in (0, 1)
    core.touched(effect.segment, SIZE)
    save(core, space, chain("y", 4))
    assert len(present(core, space, chain("y", 4))) == 4
    assert min(core.space.segments[effect.segment].generations) > before - 1
    assert core.check() == []


def test_the_pool_keeps_one_segment_and_takes_no_memory_that_is_not_there() -> None:
    core, desk, _ = filled(3)
    assert plan(core.space.segments, 1).segments == 1
    desk.free_bytes = lambda: SIZE
    assert desk.do(Resize(5 * SIZE), 0.0, dry_run=True)["added"] == 2
    with pytest.raises(PoolRefused, match="free"):
        desk.do(Resize(5 * SIZE), 0.0)
    assert core.stats()["bytes_total"] == 3 * SIZE


def test_another_process_goes_on_with_what_was_set() -> None:
    core, desk, space = filled(3)
    save(core, space, chain("x", 2))
    run(desk, desk.do(Resize(2 * SIZE), 0.0))
    desk.do(Drain(), 0.0)
    desk.do(Pin("a", chain("x", 1)[0], seconds=60.0), 0.0)
    successor = PoolCore([SIZE] * 3)
    successor.resume(core.snapshot())
    other = Desk(successor)
    other.resume(desk.snapshot())
    assert successor.check() == []
    assert successor.draining
    assert successor.stats()["bytes_total"] == 2 * SIZE
    assert other.do(List(), 0.0)["namespaces"][0]["pinned"] == 1
    assert present(successor, space, chain("x", 2)) == chain("x", 2)
    assert run(other, other.do(Clear(older_than=1.0), 0.5))["matched"] == 0, "its age is not known to be large"
    assert other.do(Resize(3 * SIZE), 0.0)["added"] == 1


def test_a_pool_too_small_for_the_minima_is_refused_before_anything_leaves() -> None:
    core, desk, _ = filled(4)
    core.set_quotas({"ann": Quota(minimum=str(SIZE)), "bob": Quota(minimum=str(2 * SIZE))})
    for dry_run in (True, False):
        with pytest.raises(PoolRefused, match="guaranteed minima"):
            desk.do(Resize(2 * SIZE), 0.0, dry_run=dry_run)
    assert core.stats()["bytes_total"] == 4 * SIZE
    assert not desk.busy
    assert run(desk, desk.do(Resize(3 * SIZE), 0.0))["done"]


def test_segments_that_lost_their_memory_count_and_cannot_be_given_up() -> None:
    core, desk, space = filled(4)
    save(core, space, chain("x", 2))
    for number in (0, 1, 2, 3):
        if not core.space.segments[number].used:
            core.lose(number)
    lost = [one.number for one in core.space.segments if one.closing]
    assert len(lost) == 3
    assert desk.do(Resize(5 * SIZE), 0.0, dry_run=True)["added"] == 1
    with pytest.raises(PoolRefused, match="3 segments wait for memory"):
        desk.do(Resize(SIZE), 0.0)
    run(desk, desk.do(Resize(3 * SIZE), 0.0))
    assert [bool(one.size) for one in core.space.segments].count(True) == 3
    for number in lost:
        core.space.regain(number)
        core.touched(number, SIZE)
    save(core, space, chain("y", 6))
    assert len(present(core, space, chain("y", 6))) == 6
    assert core.check() == []


def test_a_pool_all_of_whose_segments_lost_their_memory_is_resized_or_says_why_not() -> None:
    core, desk, _ = filled(2)
    core.lose(0)
    core.lose(1)
    with pytest.raises(PoolRefused, match="2 segments wait for memory in the place of what was taken from them"):
        desk.do(Resize(SIZE), 0.0)
    assert desk.do(Resize(2 * SIZE), 0.0)["added"] == 0
    assert desk.do(Resize(3 * SIZE), 0.0)["added"] == 1
    core.touched(2, SIZE)
    space = core.open_namespace("b", PAGE)
    save(core, space, chain("y", 2))
    assert core.check() == []


@pytest.mark.parametrize("lost", [(), (0,), (0, 1, 2)])
def test_segments_without_memory_stay_so_in_another_process(lost: tuple[int, ...]) -> None:
    """Some were given up, some lost their memory; then one of each comes back."""
    core, desk, space = filled(4)
    save(core, space, chain("x", 2))
    run(desk, desk.do(Resize(3 * SIZE), 0.0))
    gone = next(one.number for one in core.space.segments if not one.size)
    for number in lost:
        if core.space.segments[number].size and not core.space.segments[number].used:
            core.lose(number)
    out = [one.number for one in core.space.segments if one.closing]
    after = PoolCore([SIZE] * 4)
    after.resume(core.snapshot())
    for number in out:
        after.lose(number)
    assert after.check() == []
    assert [one.closing for one in after.space.segments] == [one.closing for one in core.space.segments]
    assert len(present(after, space, chain("x", 2))) == 2
    report = Desk(after).do(Resize(4 * SIZE), 0.0)
    assert report["added"] == 1
    after.touched(gone, SIZE)
    for number in out:
        after.space.regain(number)
        after.touched(number, SIZE)
    save(after, space, chain("y", 6))
    assert len(present(after, space, chain("y", 6))) == 6
    assert after.check() == []


def test_a_suffix_that_comes_while_its_prefixes_wait_to_leave_goes_first() -> None:
    core = core_of(3, 3, 3)
    desk, space = Desk(core), core.open_namespace("a", PAGE)
    x = chain("x", 4)
    save(core, space, chain("y", 3))
    save(core, space, x[:3])
    late = core.reserve(7, space, x[2], x[3:])
    report = desk.do(Resize(segment_for(3)), 0.0)
    core.commit(7, late.reservation)
    now = 0.0
    for _ in range(20):
        now += RETRY_SECONDS
        carry_out(desk)
        desk.step(now)
    report = desk.do(Follow(report["job"]), now)
    assert (report["done"], report["removed"]) == (True, 4)
    assert len(present(core, space, chain("y", 3))) == 3
    assert core.check() == []


@pytest.mark.parametrize("segments", [1, 4])
def test_a_change_of_size_that_is_refused_changes_nothing(segments: int) -> None:
    core, desk, space = filled(2)
    save(core, space, chain("x", 1))
    core.lookup(9, space, chain("x", 1), lease=True)
    for _ in range(MAX_RUNNING):
        assert not desk.do(Clear(everything=True), 0.0)["done"]
    with pytest.raises(PoolRefused, match="8 passes are running"):
        desk.do(Resize(segments * SIZE), 0.0)
    assert desk.effects == []
    assert [(one.size, one.closing) for one in core.space.segments] == [(SIZE, False)] * 2
