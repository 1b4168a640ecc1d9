"""What one message sets off is bounded, whatever its sender did before; the work is counted, not timed."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from ems.errors import PoolRefused
from ems.pool.core import index, leases
from ems.pool.core.leases import LEASE_WEIGHT
from ems.pool.core.pool_core import PoolCore
from ems.pool.layout import Writer
from tests.pool.brain import PAGE, chain, core_of, key, save
from tests.pool.wrong_core import wrong_core


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python ``call`` runs."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()  # what watches collections is not the call's
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return count


def leased(times: int, length: int = 50) -> tuple[PoolCore, int, list[bytes]]:
    """A core, a namespace with ``length`` pages, each of which is promised ``times`` times."""
    core = core_of(length + 4)
    ns, keys = core.open_namespace("a", PAGE), chain("x", length)
    save(core, ns, keys)
    for _ in range(times):
        assert core.reading.lookup(1, ns, keys, lease=True).lease
    core.settle()
    return core, ns, keys


def quarantine(core: PoolCore, ns: int, name: bytes) -> None:
    page = core.page(ns, name)
    assert page is not None
    core.quarantine(ns, page)


def test_a_report_of_a_damaged_page_costs_the_same_however_often_it_is_leased() -> None:
    costs = []
    for times in (1, 40):
        core, ns, keys = leased(times)
        costs.append(lines_of(lambda core=core, ns=ns, keys=keys: quarantine(core, ns, keys[-1])))  # type: ignore[misc]
        assert wrong_core(core) == []
    assert costs[1] <= 2 * costs[0], costs


def test_who_leaves_costs_what_he_held_however_much_others_hold() -> None:
    costs = []
    for times in (1, 200):
        core, ns, keys = leased(times, length=2)
        core.reading.lookup(2, ns, keys, lease=True)
        core.writing.reserve(2, ns, bytes(16), [key("y")])
        costs.append(lines_of(lambda core=core: core.disconnect(2, 0.0, alive=False)))  # type: ignore[misc]
    assert costs[1] <= 2 * costs[0], costs


def test_a_page_that_is_stored_again_is_promised_by_new_leases_only() -> None:
    core, ns, keys = leased(3, length=4)
    quarantine(core, ns, keys[1])
    assert wrong_core(core) == []
    save(core, ns, [keys[1]], parent=keys[0])
    again = core.reading.lookup(2, ns, keys, lease=True)
    page = core.page(ns, keys[1])
    assert page is not None
    assert page.leases == bool(len(again.pages) > 1)
    for number in list(core.leases.all):
        core.reading.release(core.leases.all[number].client_id, number)
        assert wrong_core(core) == []
    assert not core.leases._broken
    assert not core.leases._leased


def test_many_pages_behind_one_prefix_are_published_without_walking_it_for_each() -> None:
    costs: Counter[int] = Counter()
    for depth in (10, 200):
        core = core_of(depth + 60)
        ns, prefix = core.open_namespace("a", PAGE), chain("x", depth)
        save(core, ns, prefix)
        leaves = [one for number in range(50) for one in (prefix[-1], key(f"leaf {number}"))]
        reserved = core.writing.reserve(1, ns, bytes(16), leaves)
        costs[depth] = lines_of(lambda core=core, number=reserved.reservation: core.writing.commit(1, number))  # type: ignore[misc]
        assert wrong_core(core) == []
    assert costs[200] < costs[10] + 200 * 40, costs


def deep(depth: int) -> tuple[PoolCore, int, list[bytes]]:
    """A core with room for more, a namespace with one chain of ``depth`` pages."""
    core = core_of(depth + 400)
    ns, keys = core.open_namespace("a", PAGE), chain("x", depth)
    save(core, ns, keys)
    return core, ns, keys


def test_one_page_costs_the_same_however_much_it_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_WALK", 50, raising=False)
    costs = []
    for depth in (100, 2000):
        core, ns, keys = deep(depth)

        def load_and_store(core: PoolCore = core, ns: int = ns, keys: list[bytes] = keys) -> None:
            core.reading.release(1, core.reading.lookup(1, ns, keys[-1:], lease=True).lease)
            save(core, ns, [key("next")], parent=keys[-1])

        costs.append(lines_of(load_and_store))
        assert wrong_core(core) == []
    assert costs[1] <= 1.2 * costs[0], costs


def test_pages_that_might_form_a_ring_do_not_each_walk_the_whole_prefix() -> None:
    """A hundred pages that others hang on already are stored behind one long chain, in one message."""
    costs = []
    for depth in (100, 4000):
        core, ns, keys = deep(depth)
        missing = [key(f"missing {number}") for number in range(100)]
        for number, parent in enumerate(missing):
            save(core, ns, [key(f"leaf {number}")], parent=parent)
        named = [one for parent in missing for one in (keys[-1], parent)]
        costs.append(lines_of(lambda core=core, ns=ns, named=named: core.writing.reserve(1, ns, bytes(16), named)))  # type: ignore[misc]
        assert wrong_core(core) == []
    assert costs[1] <= costs[0] + 4 * 4096, costs


def test_what_is_leased_is_bounded_for_each_connection_and_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASED_EACH", 4 * (LEASE_WEIGHT + 2))
    monkeypatch.setattr(leases, "MAX_LEASED_TENANT", 6 * (LEASE_WEIGHT + 2))
    core = core_of(8)
    ann, bob = (core.open_namespace(f"//{name}/a", PAGE) for name in ("ann", "bob"))
    keys = chain("x", 2)
    save(core, ann, keys)
    core.open_namespace("//bob/a", PAGE)
    held = [core.reading.lookup(1, ann, keys, lease=True).lease for _ in range(4)]
    with pytest.raises(PoolRefused, match="release some"):
        core.reading.lookup(1, ann, keys, lease=True)
    assert core.reading.lookup(1, ann, keys, lease=False).pages, "looking costs nothing"
    for _ in range(2):
        core.reading.lookup(2, ann, keys, lease=True)
    with pytest.raises(PoolRefused, match="release some"):
        core.reading.lookup(3, ann, keys, lease=True)
    assert not core.reading.lookup(3, bob, keys, lease=True).lease
    core.reading.release(1, held[0])
    assert core.reading.lookup(1, ann, keys, lease=True).lease
    core.disconnect(1, 0.0, alive=False)
    core.disconnect(2, 0.0, alive=False)
    assert core.reading.lookup(3, ann, keys, lease=True).lease


def cut_off(writers: int) -> tuple[PoolCore, int]:
    """A core where a slot waits for each of so many writers of one process, and the namespace of these slots."""
    core = core_of(writers + 8)
    ns = core.open_namespace("a", PAGE)
    for number in range(1, writers + 1):
        core.writers[number] = Writer(7, 1, number.to_bytes(8, "little"), 4)
        assert core.writing.reserve(number, ns, bytes(16), [key(f"cut {number}")]).reservation
        core.disconnect(number, 0.0, alive=True)
    return core, ns


def test_slots_that_wait_cost_the_same_however_many_writers_they_wait_for() -> None:
    costs = []
    for writers in (2, 40):
        core, ns = cut_off(writers)
        core.writing.reserve(1000, ns, bytes(16), [key("x")])  # a segment's free slots are made
        costs.append(
            (
                lines_of(lambda core=core, ns=ns: core.writing.reserve(1000, ns, bytes(16), [key("y")])),  # type: ignore[misc]
                lines_of(lambda core=core: core.deferred.stopped(core.deferred.writers[0])),  # type: ignore[misc]
                lines_of(lambda core=core: core.deferred.overdue(1e6)),  # type: ignore[misc]
            )
        )
        assert wrong_core(core) == []
    assert costs[1] <= costs[0], costs


def test_memory_that_goes_costs_in_proportion_to_the_writers_that_its_slots_wait_for() -> None:
    costs = []
    for writers in (10, 40):
        core, _ = cut_off(writers)
        costs.append(lines_of(lambda core=core: core.deferred.drop_segment(0)))  # type: ignore[misc]
    assert costs[1] <= 5 * costs[0], costs
