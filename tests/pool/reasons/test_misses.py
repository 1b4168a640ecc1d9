"""Reasons as the brain gives them, one small history each."""

from __future__ import annotations

import tracemalloc

import pytest

from ems.errors import PoolRefused
from ems.pool.core.pool_core import PoolCore
from ems.pool.names import MAX_DESCRIBED, MAX_FACTS, MAX_RELATED, Layouts
from ems.pool.protocol.limits import MAX_ID
from ems.pool.reasons.misses import MAX_BYTES as REQUESTS_BYTES
from ems.pool.reasons.misses import MAX_LOOKS, MAX_REQUESTS, Look, MissReasons, Requests
from ems.pool.reasons.words import Reason
from tests.pool.brain import PAGE, chain, core_of, key, save, segment_for


def why(core: PoolCore, namespace: int, keys: list[bytes]) -> Reason | None:
    return Reason.of_code(core.reading.lookup(0, namespace, keys, lease=False).code)


def test_what_nobody_stored_was_never_stored() -> None:
    core = core_of(4)
    space = core.open_namespace("a", PAGE)
    save(core, space, chain("x", 2))
    assert why(core, space, chain("x", 2)) is None
    assert why(core, space, chain("x", 3)) is Reason.NEVER_STORED
    assert core.reasons.misses == {"never_stored": 1}


def test_what_is_being_written_says_so_and_then_that_it_was_not_finished() -> None:
    core = core_of(4)
    space = core.open_namespace("a", PAGE)
    reserved = core.writing.reserve(1, space, bytes(16), chain("x", 2))
    assert why(core, space, chain("x", 1)) is Reason.BEING_WRITTEN
    core.writing.abort(1, reserved.reservation)
    assert why(core, space, chain("x", 1)) is Reason.UNFINISHED


def test_a_writer_that_left_leaves_the_reason() -> None:
    core = core_of(4)
    space = core.open_namespace("a", PAGE)
    core.writing.reserve(1, space, bytes(16), chain("x", 2))
    core.disconnect(1, 5.0, alive=False)
    assert why(core, space, chain("x", 2)) is Reason.UNFINISHED


def test_a_full_namespace_evicts_for_its_own_room() -> None:
    core = core_of(2)
    space = core.open_namespace("a", PAGE)
    save(core, space, [key("old")])
    save(core, space, chain("x", 2))
    assert why(core, space, [key("old")]) is Reason.EVICTED_FULL


def test_the_watermark_is_a_reason_of_its_own() -> None:
    core = core_of(4, high_watermark=0.5, eviction_ratio=0.5)
    space = core.open_namespace("a", PAGE)
    for name in ("1", "2", "3"):
        save(core, space, [key(name)])
    assert why(core, space, [key("1")]) is Reason.EVICTED_WATERMARK


def test_who_made_room_for_whom_is_told_with_its_time() -> None:
    core = core_of(2, 2)
    rich, poor = core.open_namespace("rich", PAGE), core.open_namespace("poor", PAGE)
    for name in range(4):
        save(core, rich, [key(name)])
    core.tick(20.0)
    save(core, poor, chain("x", 1))
    core.tick(35.0)
    gone = [key(name) for name in range(4) if why(core, rich, [key(name)]) is not None]
    assert len(gone) == 2
    told = core.reading.explain("rich", gone[:1])
    assert Reason.of_code(told.codes[0]) is Reason.EVICTED_FOR_OTHERS
    assert (told.winner, told.seconds) == ("poor", 15.0)


def test_refusals_are_remembered_key_by_key() -> None:
    core = core_of(2)
    space = core.open_namespace("a", PAGE)
    save(core, space, chain("held", 2))
    core.reading.lookup(1, space, chain("held", 2), lease=True)
    core.writing.reserve(2, space, bytes(16), chain("x", 2))
    assert why(core, space, chain("x", 1)) is Reason.REFUSED_NO_SPACE
    assert why(core, space, chain("x", 2)[1:]) is Reason.REFUSED_NO_SPACE


def test_memory_that_was_not_touched_is_a_reason() -> None:
    core = PoolCore([segment_for(2)])
    space = core.open_namespace("a", PAGE)
    core.writing.reserve(2, space, bytes(16), chain("x", 1))
    assert why(core, space, chain("x", 1)) is Reason.REFUSED_NOT_TOUCHED


def test_what_came_back_is_a_hit_and_what_left_again_has_its_newest_reason() -> None:
    core = core_of(2)
    space = core.open_namespace("a", PAGE)
    save(core, space, [key("old")])
    save(core, space, chain("x", 2))
    save(core, space, [key("old")])
    assert why(core, space, [key("old")]) is None
    reserved = core.writing.reserve(1, space, bytes(16), [key("new")])
    core.writing.abort(1, reserved.reservation)
    core.writing.reserve(1, space, bytes(16), [key("new")])
    core.disconnect(1, 3.0, alive=False)
    assert why(core, space, [key("new")]) is Reason.UNFINISHED


FACTS = {"tenant": "t", "model": "m", "plane": "0.0"}


def test_another_layout_of_the_model_is_named_with_what_differs() -> None:
    core = core_of(2, 2)
    old = core.open_namespace("old", PAGE)
    layouts = core.reasons.layouts
    layouts.describe("old", {**FACTS, "block_size": "16", "dtype": "bf16"})
    layouts.describe("new", {**FACTS, "block_size": "32", "dtype": "bf16"})
    layouts.describe("plane", {**FACTS, "plane": "1.0", "block_size": "64"})
    layouts.describe("alien", {**FACTS, "tenant": "other", "block_size": "64"})
    assert Reason.of_code(core.reading.missed_namespace("new", 3)) is Reason.NEVER_STORED, "nothing is there yet"
    save(core, old, chain("x", 1))
    assert Reason.of_code(core.reading.missed_namespace("new", 3)) is Reason.OTHER_LAYOUT
    assert Reason.of_code(core.reading.missed_namespace("plane", 3)) is Reason.NEVER_STORED
    assert Reason.of_code(core.reading.missed_namespace("alien", 3)) is Reason.NEVER_STORED
    told = core.reading.explain("new", chain("y", 2))
    assert told.codes == bytes([Reason.OTHER_LAYOUT.code]) * 2
    assert [(one.namespace, one.fields) for one in told.layouts] == [("old", {"block_size": ("32", "16")})]
    new = core.open_namespace("new", PAGE)
    assert why(core, new, chain("x", 1)) is Reason.OTHER_LAYOUT
    save(core, new, chain("z", 1))
    assert why(core, new, chain("x", 1)) is Reason.NEVER_STORED


def test_pages_behind_a_missing_one_are_a_gap() -> None:
    core = core_of(4)
    space = core.open_namespace("a", PAGE)
    keys = chain("x", 4)
    save(core, space, [keys[0]])
    save(core, space, [keys[2]], parent=keys[1])
    codes = [Reason.of_code(code) for code in core.reading.explain("a", keys).codes]
    assert codes == [None, Reason.NEVER_STORED, Reason.GAP, Reason.NEVER_STORED]
    assert core.reasons.misses == {}, "to ask is no miss"


def test_lookups_are_found_by_request_and_by_a_part_that_only_one_has() -> None:
    core = core_of(4)
    space = core.open_namespace("a", PAGE)
    save(core, space, chain("x", 1))
    core.reading.lookup(1, space, chain("x", 2), lease=True, request="cmpl-17-0-abc")
    core.reading.missed_namespace("b", 4, "cmpl-17-0-abc")
    (name,) = core.reasons.requests.find("cmpl-17")
    looks = core.reasons.requests.looks(name)
    assert name == "cmpl-17-0-abc"
    assert [(look.namespace, look.asked, look.found, Reason.of_code(look.code)) for look in looks] == [
        ("a", 2, 1, Reason.NEVER_STORED),
        ("b", 4, 0, Reason.NEVER_STORED),
    ]
    assert core.reasons.requests.find("cmpl-18") == core.reasons.requests.find("") == []
    core.reading.lookup(1, space, chain("x", 2), lease=False, request="cmpl-17-1-abc")
    assert core.reasons.requests.find("cmpl-17") == ["cmpl-17-0-abc", "cmpl-17-1-abc"]


def test_requests_and_their_lookups_are_bounded() -> None:
    requests = Requests()
    for number in range(MAX_REQUESTS + 10):
        requests.looked(f"r{number:06}", Look("a", 1, 0, 1, b"", 0.0))
    assert len(requests._looks) == MAX_REQUESTS
    assert requests.find("r000009") == []
    for _ in range(MAX_LOOKS + 3):
        requests.looked("r000500", Look("a", 1, 0, 1, b"", 0.0))
    assert len(requests.looks("r000500")) == MAX_LOOKS


def test_descriptions_are_bounded_and_checked() -> None:
    layouts = Layouts()
    for number in range(MAX_DESCRIBED + 5):
        layouts.describe(f"n{number}", FACTS)
    assert len(layouts.all) == MAX_DESCRIBED
    assert not layouts.facts("n0")
    layouts.describe("n9", {**FACTS, "model": "moved"})
    assert len(layouts.all) == MAX_DESCRIBED
    assert "n9" not in layouts.related("n10")
    for facts in ({"tenant": "t"}, {"model": "m"}, {**FACTS, "long": "x" * 9000}):
        with pytest.raises(PoolRefused):
            layouts.describe("bad", facts)
    with pytest.raises(PoolRefused):
        layouts.describe("bad", {**FACTS, **{str(number): "" for number in range(MAX_FACTS)}})
    with pytest.raises(PoolRefused):
        layouts.describe("x" * 600, FACTS)


@pytest.mark.slow
def test_the_longest_ids_and_names_take_no_more_than_is_promised() -> None:
    requests = Requests()
    tracemalloc.start()
    for number in range(3 * MAX_REQUESTS):
        for look in range(MAX_LOOKS):
            name = f"{number}/{look}/" + "\U0001f600" * 500
            requests.looked(f"{number}" + "\U0001f600" * MAX_ID, Look(name, 1, 0, 1, b"", 0.0))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1.2 * REQUESTS_BYTES
    assert requests.find(f"{3 * MAX_REQUESTS - 1}" + "\U0001f600" * MAX_ID), "the newest is known"


def test_one_tenant_does_not_describe_the_layouts_of_others_away() -> None:
    layouts = Layouts()
    layouts.describe("//ann/a", {"tenant": "//ann/", "model": "m"})
    for number in range(2 * MAX_DESCRIBED):
        layouts.describe(f"//bob/{number}", {"tenant": "//bob/", "model": "m"})
    assert len(layouts.all) == MAX_DESCRIBED
    assert layouts.facts("//ann/a")
    assert layouts.facts(f"//bob/{2 * MAX_DESCRIBED - 1}")
    assert not layouts.facts("//bob/0")


def test_what_a_miss_costs_does_not_grow_with_the_layouts_of_its_model_nor_with_the_keys() -> None:
    """Every look into another layout is counted: for one key or many there are as many, and few."""
    looked = 0

    def holds(_: str) -> int:
        nonlocal looked
        looked += 1
        return 0

    book = MissReasons(holds)
    for number in range(MAX_DESCRIBED):
        book.layouts.describe(f"n{number}", {"tenant": "t", "model": "m"})
    name = f"n{MAX_DESCRIBED - 1}"
    for keys in (chain("x", 1), chain("x", 2000)):
        looked = 0
        codes = book.miss_codes(0, name, {}, keys)
        assert codes == bytes([Reason.NEVER_STORED.code]) * len(keys)
        assert 0 < looked <= MAX_RELATED
    looked = 0
    book.missed(0, name, {}, key("x"))
    book.missed_namespace(name)
    assert 0 < looked <= 2 * MAX_RELATED
