"""A clear takes out all that it was told to, in whatever order the pages are known, or says what holds the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.administration.passes import PATIENCE, RETRY_SECONDS, STEP
from ems.pool.administration.service import AdminService
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import Tail
from ems.pool.protocol.acts import Clear, Follow, Pin
from tests.pool.brain import PAGE, chain, core_of, key, present, restarted, save
from tests.pool.wrong_core import wrong_core

NAME = "ta/model/0123/0.0"
LONG = 1000


def run(service: AdminService, act: Clear, *, dry_run: bool = False, now: float = 0.0) -> tuple[dict[str, Any], float]:
    """The report at the end, and the seconds that it took where a step takes none."""
    report, begun = service.do(act, now, dry_run=dry_run), now
    while not report["done"]:
        while service.step(now):
            assert now < begun + 2 * PATIENCE
        report = service.do(Follow(report["job"]), now)
        now += 0.0 if report["done"] else RETRY_SECONDS
    return report, now - begun


def filled(*chains: tuple[str, int], slots: int = 0) -> tuple[PoolCore, int]:
    core = core_of(slots or sum(length for _, length in chains))
    ns = core.open_namespace(NAME, PAGE)
    for name, length in chains:
        save(core, ns, chain(name, length))
    return core, ns


@pytest.mark.parametrize("restarts", [0, 1, 2, 3])
@pytest.mark.parametrize("chains", [[("x", LONG)], [(f"c{number}", 30) for number in range(30)]], ids=["one", "many"])
def test_long_chains_leave_at_once_also_after_a_restart(chains: list[tuple[str, int]], restarts: int) -> None:
    core, _ = filled(*chains)
    for _ in range(restarts):
        core = restarted(core)
    pages = core.pages()
    report, seconds = run(AdminService(core), Clear(tenant="ta"))
    assert (report["matched"], report["removed"], report["kept"]) == (pages, pages, 0)
    assert seconds == 0.0, "nobody had to be waited for"
    assert core.pages() == 0
    assert wrong_core(core) == []


def test_a_clear_looks_at_each_page_a_bounded_number_of_times() -> None:
    core = restarted(filled(("x", 8 * STEP))[0])
    service = AdminService(core)
    report, steps = service.do(Clear(everything=True), 0.0), 1
    while service.step(0.0):
        steps += 1
    assert service.do(Follow(report["job"]), 0.0)["removed"] == 8 * STEP
    assert steps <= 4 * 8


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """For each page the number of the one before it, -1 for none."""
    count = draw(st.integers(1, 60))
    return [draw(st.integers(-1, number - 1)) for number in range(count)]


def planted(tree: list[int], restarts: int) -> tuple[PoolCore, int, list[bytes]]:
    core = core_of(len(tree) + 4)
    ns = core.open_namespace(NAME, PAGE)
    keys = [key(number) for number in range(len(tree))]
    for number, before in enumerate(tree):
        save(core, ns, [keys[number]], parent=bytes(16) if before < 0 else keys[before])
    for _ in range(restarts):
        core = restarted(core)
    return core, ns, keys


@given(
    tree=trees(),
    restarts=st.integers(0, 2),
    pinned=st.sets(st.integers(0, 59), max_size=3),
    read=st.sets(st.integers(0, 59), max_size=3),
    unread_before_the_end=st.booleans(),
)
def test_what_is_cleared_is_what_was_said_and_the_rest_is_accounted_for(
    tree: list[int], restarts: int, pinned: set[int], read: set[int], unread_before_the_end: bool
) -> None:
    core, ns, keys = planted(tree, restarts)
    service = AdminService(core)
    core.namespaces[ns].pins.pin([keys[one] for one in pinned if one < len(keys)], 1e9, 60)
    leases = [core.reading.lookup(7, ns, [keys[one]], lease=True).lease for one in read if one < len(keys)]
    would, _ = run(service, Clear(everything=True), dry_run=True)
    assert core.pages() == len(keys)
    report = service.do(Clear(everything=True), 0.0)
    if unread_before_the_end:
        for lease in leases:
            core.reading.release(7, lease)
    now = 0.0
    while not report["done"]:
        now += RETRY_SECONDS
        service.step(now)
        report = service.do(Follow(report["job"]), now)
    assert report["matched"] == would["matched"]
    assert report["bytes"] == would["bytes"]
    assert report["pinned"] == would["pinned"]
    assert core.pages() == report["kept"] + report["pinned"] == len(keys) - report["removed"]
    assert bool(report["held_by"]) == bool(report["kept"])
    assert all(one["client_id"] == 7 for one in report["held_by"])
    assert not (unread_before_the_end and report["kept"])
    assert now <= PATIENCE + 1.0
    assert wrong_core(core) == []
    core.disconnect(7, 0.0, alive=False)
    assert len(core.reading.lookup(1, ns, keys, lease=False).pages) == len(core.namespaces[ns].index.leading(keys))


def test_blocks_that_are_not_full_leave_too() -> None:
    core, ns = filled(("x", 5), slots=8)
    for number in range(3):
        reserved = core.writing.reserve(
            1, ns, chain("x", 5)[4], [key(number)], [Tail(key("place"), bytes([number] * 8))]
        )
        core.writing.commit(1, reserved.reservation)
    report, seconds = run(AdminService(restarted(core)), Clear(everything=True))
    assert (report["removed"], seconds) == (8, 0.0)


def test_pins_are_said_and_nobody_is_waited_for() -> None:
    core, ns = filled(("x", 10), ("y", 5))
    service = AdminService(core)
    service.do(Pin(NAME, chain("x", 10)[3]), 0.0)
    for dry_run in (True, False):
        report, seconds = run(service, Clear(everything=True), dry_run=dry_run)
        assert (report["matched"], report["pinned"], report["kept"], seconds) == (11, 4, 0, 0.0)
    assert present(core, ns, chain("x", 10)) == chain("x", 4)


def test_a_prefix_is_as_young_as_what_continues_it() -> None:
    core, ns = filled(("x", 4), slots=8)
    core.tick(100.0)
    save(core, ns, [key("young")], parent=chain("x", 4)[1])
    for dry_run in (True, False):
        report, seconds = run(AdminService(core), Clear(older_than=50.0), dry_run=dry_run, now=100.0)
        assert (report["matched"], report["kept"], report["pinned"], seconds) == (2, 0, 0, 0.0)
    assert present(core, ns, chain("x", 4)) == chain("x", 2)


def test_who_holds_what_stays_is_said() -> None:
    core, ns = filled(("x", 4), ("y", 4), slots=12)
    core.reading.lookup(7, ns, chain("x", 3), lease=True)
    core.reading.lookup(7, ns, chain("x", 2), lease=True)
    core.writing.reserve(8, ns, chain("y", 4)[3], chain("z", 2))
    report, seconds = run(AdminService(core), Clear(everything=True))
    assert seconds >= PATIENCE
    assert (report["matched"], report["removed"], report["kept"]) == (10, 1, 9)
    assert report["held_by"] == [
        {"client_id": 7, "leases": 2, "reservations": 0, "pages": 5},
        {"client_id": 8, "leases": 0, "reservations": 1, "pages": 2},
    ]


def test_what_is_being_written_leaves_once_it_is_written() -> None:
    core, ns = filled(("x", 4), slots=12)
    service = AdminService(core)
    writing = core.writing.reserve(8, ns, chain("x", 4)[3], chain("z", 2))
    assert run(service, Clear(everything=True), dry_run=True)[0]["matched"] == 6
    report = service.do(Clear(everything=True), 0.0)
    core.writing.commit(8, writing.reservation)
    service.step(1.0)
    assert service.do(Follow(report["job"]), 1.0) == {
        **service.do(Follow(report["job"]), 1.0),
        "removed": 6,
        "done": True,
    }
    assert wrong_core(core) == []


def test_an_engine_that_stores_on_does_not_keep_what_it_continues() -> None:
    """Each block is reserved before the one before it is committed, as while a long prompt is computed."""
    core, ns = filled(("x", 4), slots=64)
    service, before, now = AdminService(core), chain("x", 4)[3], 0.0
    held = core.writing.reserve(8, ns, before, [key("s0")])
    report = service.do(Clear(everything=True), now)
    for number in range(1, 30):
        after = core.writing.reserve(8, ns, key(f"s{number - 1}"), [key(f"s{number}")])
        core.writing.commit(8, held.reservation)
        held, now = after, now + RETRY_SECONDS
        service.step(now)
        save(core, ns, [key(("other", number))], client_id=9)
    core.writing.commit(8, held.reservation)
    now += RETRY_SECONDS
    service.step(now)
    report = service.do(Follow(report["job"]), now)
    assert (report["done"], report["removed"], report["kept"]) == (True, 4 + 30, 0)
    assert core.pages() == 29, "what continues nothing of it stays"
    assert wrong_core(core) == []


def test_what_came_meanwhile_and_is_pinned_ends_the_waiting() -> None:
    core, ns = filled(("x", 4), slots=12)
    service = AdminService(core)
    lease = core.reading.lookup(7, ns, chain("x", 4), lease=True).lease
    report = service.do(Clear(everything=True), 0.0)
    save(core, ns, [key("late")], parent=chain("x", 4)[3])
    service.do(Pin(NAME, key("late")), 0.0)
    core.reading.release(7, lease)
    service.step(1.0)
    report = service.do(Follow(report["job"]), 1.0)
    assert (report["done"], report["kept"], report["held_by"]) == (True, 4, [])
    assert len(core.reading.lookup(1, ns, chain("x", 4), lease=False).pages) == 4
