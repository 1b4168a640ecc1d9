"""Histories of faults, and whether the kit would notice if something were wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from ems.pool.core import reclaim
from ems.pool.core.eviction import evict
from ems.pool.core.index import Index
from ems.pool.core.pins import PinSet
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.shares import Shares
from ems.pool.core.writing import Writing
from ems.pool.names import qualified
from ems.pool.node.clients import Clients
from ems.pool.node.memory import Memory
from ems.pool.pages import Page
from ems.pool.segments import recovery
from ems.pool.segments.headers import Headers
from ems.pool.segments.reader import PageReader
from ems.pool.tenants import request_filter
from ems.pool.tiers import packs
from ems.pool.tiers.answers import ForgetResult
from ems.pool.tiers.manager import TierManager
from tests.faults import steps as kinds
from tests.faults import writers
from tests.faults.covered import uncovered
from tests.faults.history import History, Step, generate, run, shrink, sweep
from tests.faults.node import HistoryNode

SAVES = [Step("save", 0, name, path) for name, path in ((0, 0), (0, 3), (3, 6), (0, 9), (4, 1))]
DAMAGED_DOWN = [Step("save", 9911, 4419, 30323), Step("flip both", 62803, 27774, 24429),
                Step("down and up", 48943, 14429, 13548)]  # fmt: skip
LOADS = [Step("load", 1, 1, number) for number in range(6)]


def first_violation(count: int = 400, *, tiers: bool = False, tenants: bool = False) -> str | None:
    """What the kit finds in up to ``count`` histories, of those with tiers or tenants if that matters."""
    histories = (generate(seed) for seed in range(count))
    fit = (one for one in histories if one.tiers >= tiers and one.tenants >= tenants)
    return next((found for one in fit if (found := run(one).violation) is not None), None)


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, 6))])
def test_nothing_happens_that_must_not(batch: int) -> None:
    for seed in range(batch * 10, batch * 10 + 10):
        report = run(generate(seed))
        assert report.violation is None, f"seed {seed}, see scripts/histories.py --only {seed}"


def test_a_history_always_goes_the_same_way() -> None:
    assert generate(3) == generate(3)
    assert generate(3) != generate(4)
    assert run(generate(3)) == run(generate(3))


def test_histories_do_all_that_there_is_to_do() -> None:
    kinds_done = {step.kind for seed in range(40) for step in generate(seed).steps}
    assert kinds_done == kinds.STEPS.keys()


# The node is killed at every write of a history in turn


@pytest.mark.parametrize(
    "steps",
    [
        [*SAVES, *LOADS],
        [Step("save", 0, 0, 267), Step("save", 0, 0, 268), Step("flip description"), Step("stop"), *SAVES],
        [Step("save", 0, 0, path) for path in range(44)],
        [Step("reserve", 0, 0, 3), Step("leave", 0, 0), *SAVES, Step("restart"), Step("abort"), Step("tick", 3)],
    ],
    ids=["saves", "segments that begin anew", "evictions and tails", "writers that leave"],
)
def test_a_node_killed_at_any_write_loses_nothing(steps: list[Step]) -> None:
    places = 0
    for place, report in sweep(History(steps)):
        assert report.violation is None, f"killed at write {place}"
        places += sum(report.killed_at.values())
    assert places > 10


# What the kit found


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [Step("save", 0, 0, 3), Step("save", 0, 3, 3), Step("flip description"), Step("fill memory"), Step("stop")],
            id="a segment could not begin anew, and those behind it were lost",
        ),
        pytest.param(
            [Step("save", 0, 0, 0), Step("flip tails", 0, 3499), Step("stop"), Step("save", 0, 0, 1), Step("crash")],
            id="tokens behind a damaged record were lost",
        ),
        pytest.param(
            [Step("save", 0, 0, 0), Step("flip tails", 0, 16, 3), Step("stop"), Step("save", 0, 0, 1), Step("crash")],
            id="tokens behind a record with another name were lost",
        ),
        pytest.param(
            [Step("fill memory"), Step("save", 0, 0, 0), Step("fill memory"), Step("save", 0, 0, 6), Step("crash")],
            id="tokens behind a record that did not fit were lost",
        ),
        pytest.param(
            [Step("reserve", 0, 0, 300), Step("crash"), Step("jump", 5)],
            id="slots rested for as long as the clock was set back",
        ),
        pytest.param(
            [Step("save", 0, 0, 300), *(Step("flip both", page, 4) for page in range(4)), *LOADS],
            id="a damaged header said that a damaged page has no checksum",
        ),
    ],
)
def test_what_the_kit_found(steps: list[Step]) -> None:
    assert run(History(steps)).violation is None


def test_a_damaged_page_does_not_come_back_from_a_tier_as_a_good_one() -> None:
    assert run(History(DAMAGED_DOWN, tiers=1, policy="arc")).violation is None


# Would it notice?


def test_it_notices_when_readers_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageReader, "sound", lambda _reader, _pages, _begin, end: end)
    assert "a wrong byte was served" in str(first_violation())


def test_it_notices_when_slots_of_earlier_writers_do_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    read = recovery._read

    def forgetful(image: recovery.SegmentImage, *limits: int) -> Any:
        found = read(image, *limits)
        if not isinstance(found, recovery._Found):
            return found
        return msgspec.structs.replace(found, resting=np.zeros_like(found.resting))

    monkeypatch.setattr(recovery, "_read", forgetful)
    assert "another writer may still write into it" in str(first_violation())


def test_it_notices_when_a_page_is_published_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "fill", lambda writing, at, _=1.0: writing.written.add(at))
    assert "has other bytes than were committed" in str(first_violation())


def test_it_notices_when_slots_are_promised_without_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Headers, "begin_writing", lambda *_: None)
    assert first_violation() is not None


def test_it_notices_when_headers_are_believed_that_are_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "headers_are_sound", lambda headers: np.ones(len(headers), bool))
    assert first_violation() is not None


def test_it_notices_when_somebody_who_left_still_holds_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolCore, "leave", lambda *_, **__: iter(()))
    assert "when everybody has gone" in str(run(History([Step("reserve", 0, 0, 3)])).violation)


@pytest.mark.parametrize("way", [0, 1], ids=["connection", "node"])
def test_it_notices_when_slots_of_a_slow_writer_are_given_to_others(monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    slow = History([Step("slow writer", 0, 1, path + way) for path in range(0, 40, 2)])
    assert run(slow).violation is None
    monkeypatch.setattr(HistoryNode, "may_write", lambda *_: False)
    assert "while another writer may still write into it" in str(run(slow).violation)


# Would it notice, of tiers, tenants and administration?


@pytest.mark.slow
def test_it_notices_when_a_tier_does_not_look_at_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "open_page", lambda _head, _record, stored: stored)
    assert "byte" in str(first_violation(tiers=True))


def test_it_notices_when_damaged_headers_are_believed_on_the_way_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Headers, "checksum", lambda *_: None)
    assert "has other bytes than were committed" in str(run(History(DAMAGED_DOWN, tiers=1, policy="arc")).violation)


def test_it_notices_when_what_was_written_to_a_tier_stays_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierManager, "_let_go", lambda _, state, units: state.write_back.ended(units))
    assert "leases" in str(first_violation(tiers=True))


@pytest.mark.slow
def test_it_notices_when_slots_of_a_thread_that_hangs_do_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    disconnect = PoolCore.disconnect

    def hasty(core: PoolCore, client_id: int, now: float, *, alive: bool) -> None:
        disconnect(core, client_id, now, alive=alive and client_id > 0)

    monkeypatch.setattr(PoolCore, "disconnect", hasty)
    assert "a thread of a tier may still write into it" in str(first_violation(1000, tiers=True))


def test_it_notices_when_a_tenant_loses_what_it_was_guaranteed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "may_donate", lambda *_: True)
    steps = [
        Step("resize", 40535, 65024, 6894),
        Step("down and up", 32193, 15369, 7342),
        Step("crowd", 59898, 5201, 2729),
    ]
    crowded = History(steps, policy="s3fifo", watermark=0.8, tiers=2, prompt=True, tenants=True)
    assert "it was guaranteed" in str(run(crowded).violation)


def test_it_notices_when_a_tenant_has_more_than_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "may_grow", lambda *_: True)
    assert "its cap is" in str(first_violation(tenants=True))


def test_it_notices_when_memory_passes_from_tenant_to_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "renew", lambda *_: None)
    assert "is mapped by another" in str(first_violation(tenants=True))


def test_it_notices_when_a_key_that_was_revoked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clients, "end_unwelcome", lambda _: None)
    assert "is still in" in str(first_violation(tenants=True))


def test_it_notices_when_tenants_share_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_filter, "qualified", lambda _, name: qualified("red", name))
    assert first_violation(tenants=True) is not None


def test_it_notices_when_pinned_pages_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict_pinned(index: Index, count: int, free: Callable[[Page], None], pins: PinSet) -> int:
        awaited = PinSet()
        awaited.awaited = pins.awaited
        return evict(index, count, free, awaited)

    monkeypatch.setattr(reclaim, "evict", evict_pinned)
    steps = [
        Step("slow writer", 57698, 55515, 7066),
        Step("save", 60280, 56068, 18017),
        Step("pin", 1430, 46740, 22254),
        Step("save", 14990, 58791, 24007),
    ]
    full = History(steps, policy="s3fifo", watermark=0.8, checksums_optional=False)
    assert "left while it was pinned" in str(run(full).violation)


def test_it_notices_when_what_was_cleared_comes_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs.PackTier, "forget", lambda *_, **__: ForgetResult(0, 0))
    steps = [
        Step("reserve", 38154, 1022, 16691),
        Step("down and up", 34586, 22867, 6638),
        Step("await pages", 34945, 48731, 22572),
        Step("clear", 9117, 53897, 60777),
    ]
    below = History(steps, policy="s3fifo", tiers=1, prompt=True, tenants=True)
    assert "was cleared, and a tier hands it out" in str(run(below).violation)


def test_it_notices_when_a_drained_node_takes_pages_in(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Writing.reserve

    def careless(writing: Writing, *arguments: Any) -> Any:
        was, writing._state.draining = writing._state.draining, False
        reserved = reserve(writing, *arguments)
        writing._state.draining = was
        return reserved

    monkeypatch.setattr(Writing, "reserve", careless)
    steps = [Step("drain", 54305, 28406, 7657), Step("down and up", 13442, 48623, 63671)]
    below = History(steps, policy="forecast", tiers=2, prompt=True)
    assert "a node that drains takes a page in" in str(run(below).violation)


def test_a_large_run_must_have_gone_through_everything() -> None:
    assert uncovered(10, {}, {}, {}) == []
    never = uncovered(10_000, dict.fromkeys(kinds.STEPS, 1), {"crash": 3}, {})
    assert "page promoted" in never
    assert "killed at: header" in never
    assert "crash" not in never


def test_a_history_that_fails_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.STEPS, "jump", (lambda world, a, b, c: world.clients.clear(), 1))

    def fails(history: History) -> bool:
        kinds_of = [step.kind for step in history.steps]
        return "jump" in kinds_of and "stop" in kinds_of

    seed = next(seed for seed in range(100) if fails(generate(seed)))
    assert sorted(step.kind for step in shrink(generate(seed), fails).steps) == ["jump", "stop"]
