"""What an administrator asks of the brain: it does what it says, and nothing when it is only to say it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ems.errors import PoolRefused, StaleReference
from ems.pool.administration import passes
from ems.pool.administration.passes import PATIENCE, STEP
from ems.pool.administration.selection import model_of, tenant_of
from ems.pool.administration.service import AdminService
from ems.pool.core.pool_core import PoolCore
from ems.pool.pages import Outcome
from ems.pool.protocol.acts import Clear, Drain, Follow, List, Pin, Show, Warm
from ems.pool.reasons.words import Reason
from tests.pool.brain import PAGE, chain, core_of, key, outcomes, present, restarted, save
from tests.pool.wrong_core import wrong_core

NAME = "tenant/org/model/0123/0.0"
OTHER = "other/model/4567"


def filled() -> tuple[PoolCore, AdminService, int, int]:
    core = core_of(4, 4)
    one, two = core.open_namespace(NAME, PAGE), core.open_namespace(OTHER, PAGE)
    save(core, one, chain("x", 3))
    save(core, two, chain("y", 2))
    return core, AdminService(core), one, two


def run(service: AdminService, report: dict[str, Any], now: float = 0.0) -> dict[str, Any]:
    """The report at the end of what ``report`` began."""
    while not report["done"]:
        now += passes.RETRY_SECONDS
        service.step(now)
        report = service.do(Follow(report["job"]), now)
    return report


def test_a_list_has_every_namespace_with_its_figures() -> None:
    core, service, _, _ = filled()
    core.tick(7.0)
    rows = service.do(List(), 7.0)["namespaces"]
    assert [(row["namespace"], row["tenant"], row["model"], row["pages"], row["bytes"]) for row in rows] == [
        (NAME, "tenant", "org/model", 3, 3 * PAGE),
        (OTHER, "other", "model", 2, 2 * PAGE),
    ]
    assert all(row["idle_seconds"] == 7.0 for row in rows)


def test_a_list_counts_the_leases_of_each_namespace() -> None:
    core, service, one, two = filled()
    for ns, keys in ((one, chain("x", 3)), (one, chain("x", 2)), (two, chain("y", 1))):
        core.reading.lookup(1, ns, keys, lease=True)
    core.open_namespace("empty/m/0123", PAGE)
    assert [row["leases"] for row in service.do(List(), 0.0)["namespaces"]] == [2, 1, 0]
    assert service.do(Show(OTHER), 0.0)["leases"] == 1


@pytest.mark.parametrize(
    ("name", "tenant", "model"),
    [
        ("t/m/0123", "t", "m"),
        ("t/a/b/0123/1.0", "t", "a/b"),
        ("t%2Fu/m/0123", "t/u", "m"),
        ("alone", "alone", ""),
        ("t/m", "t", "m"),
        ("//acme/t/m/0123/0.0", "acme", "m"),
        ("//acme/default/m/0123", "acme", "m"),
        ("//acme/default/a/b/0123/1.0", "acme", "a/b"),
    ],
)
def test_tenant_and_model_are_in_the_name(name: str, tenant: str, model: str) -> None:
    assert (tenant_of(name), model_of(name)) == (tenant, model)


def test_a_model_is_called_the_same_before_and_after_a_restart() -> None:
    core, service, _, _ = filled()
    core.reasons.layouts.describe(NAME, {"tenant": "told", "model": "otherwise"})
    before = [(row["tenant"], row["model"]) for row in service.do(List(), 0.0)["namespaces"]]
    after = AdminService(restarted(core))
    assert [(row["tenant"], row["model"]) for row in after.do(List(), 0.0)["namespaces"]] == before
    assert run(after, after.do(Clear(model="org/model"), 0.0))["removed"] == 3


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (Clear(tenant="tennant"), "there is no tenant 'tennant', did you mean tenant?"),
        (Clear(tenant="nobody"), "there is no tenant 'nobody', there are other, tenant"),
        (Clear(model="models"), "there is no model 'models', did you mean model"),
        (Clear(namespace=NAME[:-1]), f"there is no namespace '{NAME[:-1]}', did you mean {NAME}?"),
        (Clear(tenant="tenant", model="model"), "no namespace is of tenant 'tenant' and model 'model' at once"),
        (Pin("tenant/org/model"), f"did you mean {NAME}?"),
    ],
)
def test_a_selection_of_nothing_is_refused_and_close_names_are_told(act: Clear | Pin, sentence: str) -> None:
    core, service, _, _ = filled()
    for dry_run in (True, False):
        with pytest.raises(PoolRefused, match=re.escape(sentence)):
            service.do(act, 0.0, dry_run=dry_run)
    assert (core.pages(), service.passes) == (5, 0)


def test_an_empty_pool_has_nothing_to_be_cleared() -> None:
    service = AdminService(core_of(2))
    assert service.do(Clear(everything=True), 0.0)["done"]
    assert service.do(Clear(older_than=1.0), 0.0)["matched"] == 0
    with pytest.raises(PoolRefused, match="the pool is empty"):
        service.do(Clear(tenant="t"), 0.0)


@pytest.mark.parametrize(
    ("act", "left"),
    [
        (Clear(tenant="tenant"), (0, 2)),
        (Clear(model="model"), (3, 0)),
        (Clear(namespace=NAME), (0, 2)),
        (Clear(everything=True), (0, 0)),
    ],
)
def test_clear_takes_out_what_is_meant_and_no_more(act: Clear, left: tuple[int, int]) -> None:
    core, service, one, two = filled()
    would = run(service, service.do(act, 0.0, dry_run=True))
    assert (len(present(core, one, chain("x", 3))), len(present(core, two, chain("y", 2)))) == (3, 2)
    did = run(service, service.do(act, 0.0))
    assert (len(present(core, one, chain("x", 3))), len(present(core, two, chain("y", 2)))) == left
    assert would["matched"] == did["matched"] == did["removed"] == 5 - sum(left)
    assert (would["removed"], did["kept"]) == (0, 0)
    assert wrong_core(core) == []


def test_what_was_cleared_says_so() -> None:
    core, service, one, _ = filled()
    run(service, service.do(Clear(tenant="tenant"), 0.0))
    assert Reason.of_code(core.reading.lookup(1, one, chain("x", 1), lease=False).code) is Reason.CLEARED


def test_only_what_is_old_enough_is_cleared() -> None:
    core = core_of(6)
    ns, service = core.open_namespace(NAME, PAGE), AdminService(core)
    save(core, ns, chain("old", 2))
    save(core, ns, chain("read", 1))
    core.tick(100.0)
    found = core.reading.lookup(1, ns, chain("read", 1), lease=True)
    core.reading.release(1, found.lease)
    save(core, ns, chain("new", 2))
    did = run(service, service.do(Clear(older_than=60.0), 100.0))
    assert did["removed"] == 2
    assert present(core, ns, [*chain("old", 2), *chain("read", 1), *chain("new", 2)]) == [
        *chain("read", 1),
        *chain("new", 2),
    ]


def test_a_page_that_is_read_is_not_found_any_more_and_leaves_when_it_is_released() -> None:
    core, service, one, _ = filled()
    found = core.reading.lookup(1, one, chain("x", 2), lease=True)
    report = service.do(Clear(tenant="tenant"), 0.0)
    assert (report["done"], report["removed"], report["kept"]) == (False, 1, 2)
    assert wrong_core(core) == []
    missed = core.reading.lookup(2, one, chain("x", 2), lease=True)
    assert (missed.pages, Reason.of_code(missed.code)) == ([], Reason.CLEARED)
    assert not core.writing.reserve(2, one, bytes(16), chain("x", 2)).granted, "its slot is still read"
    core.reading.release(1, found.lease)
    assert run(service, report)["removed"] == 3
    assert core.stats()["leases"] == 0
    assert wrong_core(core) == []
    assert len(save(core, one, chain("x", 2)).granted) == 2
    assert core.reading.lookup(2, one, chain("x", 2), lease=False).pages


def test_a_reader_that_never_ends_keeps_its_pages_and_ends_the_pass() -> None:
    core, service, one, _ = filled()
    core.reading.lookup(1, one, chain("x", 2), lease=True)
    report = service.do(Clear(tenant="tenant"), 0.0)
    service.step(PATIENCE + 1)
    report = service.do(Follow(report["job"]), 0.0)
    assert (report["done"], report["removed"], report["kept"]) == (True, 1, 2)
    assert not service.passes
    assert len(core.reading.lookup(2, one, chain("x", 2), lease=False).pages) == 2, "they can be found again"


def test_a_page_that_is_pinned_while_it_waits_to_leave_stays() -> None:
    core, service, one, _ = filled()
    found = core.reading.lookup(1, one, chain("x", 2), lease=True)
    report = service.do(Clear(tenant="tenant"), 0.0)
    service.do(Pin(NAME, chain("x", 1)[0]), 0.0)
    core.reading.release(1, found.lease)
    report = run(service, report)
    assert (report["removed"], report["kept"]) == (2, 1)
    assert len(core.reading.lookup(2, one, chain("x", 2), lease=False).pages) == 1, "it is found again"


def test_what_a_writer_goes_on_from_stays_until_it_is_done() -> None:
    core, service, one, _ = filled()
    writing = core.writing.reserve(1, one, chain("x", 3)[2], chain("z", 1))
    report = service.do(Clear(tenant="tenant"), 0.0)
    assert not report["done"]
    core.writing.abort(1, writing.reservation)
    assert run(service, report)["removed"] == 4, "the page that was begun is gone as well"
    assert wrong_core(core) == []


def test_long_work_is_done_in_steps() -> None:
    core = core_of(3 * STEP)
    ns, service = core.open_namespace(NAME, PAGE), AdminService(core)
    keys = chain("x", 3 * STEP)
    for first in range(0, len(keys), STEP):
        save(core, ns, keys[first : first + STEP], keys[first - 1] if first else bytes(16))
    report = service.do(Clear(everything=True), 0.0)
    assert 0 < report["looked_at"] <= STEP
    assert not report["done"]
    assert service.step(0.0), "there is more to be done"
    assert run(service, report)["removed"] == 3 * STEP
    assert len(core.namespaces[ns].index) == 0


def test_clear_must_be_told_what() -> None:
    _, service, _, _ = filled()
    for act in (Clear(), Clear(tenant="x", everything=True), Clear(older_than=-1.0), Clear(older_than=float("nan"))):
        with pytest.raises(PoolRefused):
            service.do(act, 0.0)


def test_a_job_that_nobody_knows_is_said_so() -> None:
    _, service, _, _ = filled()
    with pytest.raises(StaleReference):
        service.do(Follow(12), 0.0)


def test_pinned_pages_stay_until_their_time() -> None:
    core = core_of(6)
    ns, service = core.open_namespace(NAME, PAGE), AdminService(core)
    save(core, ns, chain("x", 2))
    assert run(service, service.do(Pin(NAME, b"".join(chain("x", 2))), 0.0, dry_run=True))["pages"] == 2
    report = service.do(Pin(NAME, b"".join(chain("x", 2)), seconds=60.0), 0.0)
    assert (report["pages"], report["pinned"], report["refused"], report["done"]) == (2, 2, 0, True)
    for name in range(10):
        save(core, ns, [key(name)])
    assert run(service, service.do(Clear(everything=True), 0.0))["kept"] == 0
    assert present(core, ns, chain("x", 2)) == chain("x", 2)
    assert (core.stats()["leases"], core.stats()["pinned"]) == (0, 2)
    assert wrong_core(core) == []
    core.tick(59.0)
    assert service.do(List(), 0.0)["namespaces"][0]["pinned"] == 2
    core.tick(60.0)
    assert core.stats()["pinned"] == 0
    assert run(service, service.do(Clear(everything=True), 0.0))["removed"] == 2


def test_no_more_than_half_is_pinned_and_a_pin_can_be_taken_off() -> None:
    core = core_of(6)
    ns, service = core.open_namespace(NAME, PAGE), AdminService(core)
    save(core, ns, chain("x", 5))
    report = service.do(Pin(NAME), 0.0)
    assert (report["pages"], report["refused"], report["pinned"]) == (3, 2, 3)
    assert service.do(Pin(NAME), 0.0)["pinned"] == 3
    assert service.do(Pin(NAME, pinned=False), 0.0, dry_run=True)["pages"] == 3
    assert service.do(Pin(NAME, pinned=False), 0.0)["pages"] == 3
    assert core.stats()["pinned"] == 0
    with pytest.raises(PoolRefused, match="no namespace"):
        service.do(Pin("nobody"), 0.0)


def test_a_draining_node_takes_nothing_in_and_serves_what_it_has() -> None:
    core, service, one, _ = filled()
    assert service.do(Drain(), 0.0, dry_run=True)["draining"] is False
    reserved = core.writing.reserve(1, one, chain("x", 3)[2], chain("z", 1))
    report = service.do(Drain(), 0.0)
    assert (report["draining"], report["reservations"]) == (True, 1)
    refused = core.writing.reserve(2, one, bytes(16), [*chain("x", 1), *chain("z", 1), key("new")])
    assert outcomes(refused) == [Outcome.PRESENT, Outcome.WRITING, Outcome.NO_SPACE]
    assert not refused.reservation
    core.writing.commit(1, reserved.reservation)
    assert len(core.reading.lookup(1, one, [*chain("x", 3), *chain("z", 1)], lease=False).pages) == 4
    assert Reason.of_code(core.reading.lookup(1, one, [key("new")], lease=False).code) is Reason.REFUSED_DRAINING
    service.do(Drain(draining=False), 0.0)
    core.writing.abort(3, core.writing.reserve(3, two_of(core), bytes(16), [key("new")]).reservation)
    assert core.counters.refused_draining == 1


def two_of(core: PoolCore) -> int:
    return core.find_namespace(OTHER)


def test_a_page_is_shown_wherever_its_key_is_known() -> None:
    core, service, one, _ = filled()
    keys = chain("x", 3)
    core.reading.lookup(1, one, keys[:2], lease=True)
    report = service.do(Show(keys[1].hex()), 3.0)
    (row,) = report["namespaces"]
    assert (row["namespace"], row["state"], row["leases"], row["continued_by"]) == (NAME, "present", 1, 1)
    assert (row["prefix"], row["prefix_present"]) == (keys[0].hex(), True)
    reserved = core.writing.reserve(1, one, bytes(16), [key("begun")])
    assert service.do(Show(key("begun").hex()), 0.0)["namespaces"][0]["state"] == "being_written"
    core.writing.abort(1, reserved.reservation)
    (row,) = service.do(Show(key("begun").hex()), 0.0)["namespaces"]
    assert (row["state"], row["reason"]) == ("absent", "unfinished")
    assert service.do(Show(key("nobody").hex()), 0.0)["namespaces"] == []


def test_a_namespace_is_shown_with_its_other_layouts() -> None:
    core, service, _, _ = filled()
    for name, size in ((NAME, "16"), (OTHER, "32")):
        core.reasons.layouts.describe(name, {"tenant": "t", "model": "m", "block_size": size})
    report = service.do(Show(NAME), 0.0)
    assert (report["kind"], report["model"], report["facts"]["block_size"]) == ("namespace", "org/model", "16")
    assert report["other_layouts"] == [{"namespace": OTHER, "differs": {"block_size": ("16", "32")}}]


def test_a_request_is_shown_with_what_it_found_and_what_is_known_by_now() -> None:
    core, service, one, _ = filled()
    core.writing.reserve(1, one, bytes(16), [key("begun")])
    core.disconnect(1, 5.0, alive=False)
    core.reading.lookup(1, one, [key("begun")], lease=True, request="req-1")
    core.tick(9.0)
    report = service.do(Show("req-1"), 9.0)
    (row,) = report["lookups"]
    assert (report["request"], row["asked"], row["found"], row["reason"]) == ("req-1", 1, 0, "unfinished")
    assert row["detail"] == "4 s ago"
    with pytest.raises(PoolRefused):
        service.do(Show("nothing of that name"), 0.0)


def test_what_is_not_there_is_refused_in_a_sentence() -> None:
    _, service, _, _ = filled()
    with pytest.raises(PoolRefused, match="no tier"):
        service.do(Warm(NAME), 0.0)
