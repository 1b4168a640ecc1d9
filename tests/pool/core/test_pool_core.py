"""The brain's verbs, one promise a test; the histories are in test_core_machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import NoSpace, PoolRefused, StaleReference
from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import Tail, split_keys
from ems.pool.layout import writer_of
from ems.pool.pages import Outcome, Page
from tests.pool.brain import PAGE, chain, core_of, key, outcomes, present, save, segment_for
from tests.pool.wrong_core import wrong_core


def test_a_commit_that_names_an_unknown_page_publishes_nothing() -> None:
    core = core_of(4)
    namespace = core.open_namespace("a", PAGE)
    keys = chain("x", 2)
    reserved = core.writing.reserve(1, namespace, bytes(16), keys)
    with pytest.raises(StaleReference):
        core.writing.commit(1, reserved.reservation, [0, 7])
    with pytest.raises(StaleReference):
        core.writing.commit(1, reserved.reservation, [-1])
    assert present(core, namespace, keys) == []
    assert [page.key for page in core.writing.commit(1, reserved.reservation).pages] == keys
    assert wrong_core(core) == []


@pytest.mark.timeout(10)
def test_a_page_that_claims_to_be_its_own_prefix_hangs_nothing() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    save(core, namespace, [key("x")], parent=key("x"))
    found = core.reading.lookup(1, namespace, [key("x")], lease=True)
    core.reading.release(1, found.lease)
    assert wrong_core(core) == []


@pytest.mark.timeout(10)
def test_pages_that_claim_to_be_each_others_prefix_hang_nothing_and_can_be_evicted() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    save(core, namespace, [key("x")], parent=key("y"))
    save(core, namespace, [key("y")], parent=key("x"))
    found = core.reading.lookup(1, namespace, [key("x")], lease=True)
    core.reading.release(1, found.lease)
    assert wrong_core(core) == []
    assert outcomes(save(core, namespace, chain("new", 2))) == [Outcome.GRANTED, Outcome.GRANTED]


def test_a_prefix_committed_after_its_suffix_leaves_after_it() -> None:
    core = core_of(3)
    namespace = core.open_namespace("a", PAGE)
    first, second = chain("x", 2)
    prefix = core.writing.reserve(1, namespace, bytes(16), [first])
    suffix = core.writing.reserve(2, namespace, first, [second])
    core.writing.commit(2, suffix.reservation)
    core.writing.commit(1, prefix.reservation)
    found = core.reading.lookup(1, namespace, [second], lease=True)
    core.reading.release(1, found.lease)
    save(core, namespace, chain("other", 2))
    assert present(core, namespace, [first, second]) == [first]
    assert wrong_core(core) == []


def test_a_prefix_saved_again_below_an_orphan_leaves_after_it() -> None:
    core = core_of(3)
    namespace = core.open_namespace("a", PAGE)
    first, second = chain("x", 2)
    save(core, namespace, [second], parent=first)
    save(core, namespace, [first])
    found = core.reading.lookup(1, namespace, [second], lease=True)
    core.reading.release(1, found.lease)
    save(core, namespace, chain("other", 2))
    assert present(core, namespace, [first, second]) == [first]
    assert wrong_core(core) == []


def test_room_for_a_suffix_is_not_made_by_evicting_its_own_prefix() -> None:
    core = core_of(3)
    namespace = core.open_namespace("a", PAGE)
    first, second, third = chain("x", 3)
    save(core, namespace, [first])
    save(core, namespace, [key("young"), key("younger")])
    held = core.writing.reserve(1, namespace, first, [second])
    assert outcomes(held) == [Outcome.GRANTED]
    core.writing.reserve(2, namespace, second, [third])
    core.writing.commit(1, held.reservation)
    assert present(core, namespace, [first, second]) == [first, second]
    assert wrong_core(core) == []


def test_room_for_a_prefix_is_not_made_by_evicting_its_own_suffix() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    first, second = chain("x", 2)
    save(core, namespace, [second], parent=first)
    save(core, namespace, [key("young")])
    assert outcomes(core.writing.reserve(1, namespace, bytes(16), [first, second])) == [
        Outcome.GRANTED,
        Outcome.PRESENT,
    ]
    assert wrong_core(core) == []


def test_an_aborted_prefix_leaves_its_suffix_evictable() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    first, second = chain("x", 2)
    prefix = core.writing.reserve(1, namespace, bytes(16), [first])
    save(core, namespace, [second], parent=first, client_id=2)
    core.writing.abort(1, prefix.reservation)
    assert wrong_core(core) == []
    assert outcomes(save(core, namespace, chain("new", 2))) == [Outcome.GRANTED, Outcome.GRANTED]
    assert wrong_core(core) == []


@pytest.mark.slow
def test_a_pool_full_of_leases_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(600)
    namespace = core.open_namespace("a", 64)
    slots = core.stats()["bytes_total"] // 128  # type: ignore[operator]
    keys = chain("x", slots)
    half = len(save(core, namespace, keys[: slots // 2]).granted)
    more = len(save(core, namespace, keys[half:], keys[half - 1]).granted)
    leased = keys[: half + more]
    assert len(core.reading.lookup(1, namespace, leased, lease=True).pages) == len(leased) > 50_000
    core.settle()
    looked_at = 0
    policy = core.namespaces[namespace].index.policy
    first = policy.first

    def count() -> Page | None:
        nonlocal looked_at
        looked_at += 1
        return first()

    monkeypatch.setattr(policy, "first", count)
    refused = core.writing.reserve(2, namespace, bytes(16), chain("new", 1024))
    assert outcomes(refused) == [Outcome.NO_SPACE] * 1024
    assert refused.reservation == 0
    assert 0 < looked_at < 20_000


# Sharing


def test_the_second_namespace_gets_segments_when_the_first_filled_everything() -> None:
    core = core_of(4, 4, 4, 4)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", 2 * PAGE)
    keys = chain("x", 16)
    save(core, first, keys)
    assert present(core, first, keys) == keys
    reserved = core.writing.reserve(2, second, bytes(16), chain("y", 2))
    assert outcomes(reserved) == [Outcome.GRANTED] * 2
    assert [assigned.namespace for assigned in reserved.assigned] == ["b"]
    assert wrong_core(core) == []


def test_a_segment_of_others_none_of_whose_slots_is_out_is_taken_if_it_has_room() -> None:
    core = core_of(1, 4, 4)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", 2 * PAGE)
    save(core, first, chain("x", 4))
    begun = [core.writing.reserve(2, first, bytes(16), chain(name, count)) for name, count in (("y", 4), ("z", 1))]
    assert [one.segment for reserved in begun for one in reserved.assigned] == [2, 0]
    for reserved in begun:
        core.writing.abort(2, reserved.reservation)
    reserved = core.writing.reserve(3, second, bytes(16), [key("large")])
    assert outcomes(reserved) == [Outcome.GRANTED]
    assert [one.segment for one in reserved.assigned] == [2]
    assert present(core, first, chain("x", 4)) == chain("x", 4)
    assert wrong_core(core) == []


def test_a_namespace_takes_no_more_than_its_share() -> None:
    core = core_of(2, 2, 2, 2)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", PAGE)
    save(core, first, chain("x", 8))
    for number in range(12):
        save(core, second, [key(number)])
    assert len(present(core, second, [key(number) for number in range(12)])) == 4
    assert len(present(core, first, chain("x", 8))) == 4
    assert wrong_core(core) == []


def test_a_segment_with_slots_that_wait_for_writers_is_emptied_last_and_gets_other_memory() -> None:
    core = core_of(2, 2)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", PAGE)
    young, old, other = key("young"), key("old"), key("other")
    save(core, first, [old])
    core.writing.reserve(2, first, bytes(16), [key("half")])
    save(core, first, [young])
    core.writing.reserve(3, first, bytes(16), [key("other half")])
    core.disconnect(2, 1.0, alive=True)
    core.disconnect(3, 1.0, alive=False)
    reserved = core.writing.reserve(4, second, bytes(16), [other])
    assert outcomes(reserved) == [Outcome.GRANTED]
    assert present(core, first, [old, young]) == [old], "the other one had to get other memory"
    core.writing.abort(4, reserved.reservation)
    save(core, second, [key("b0"), key("b1")])
    third = core.open_namespace("c", PAGE)
    core.tick(100.0)
    (assigned,) = core.writing.reserve(5, third, bytes(16), [key("c")]).assigned
    assert assigned.renewed == (assigned.segment == 0)
    assert wrong_core(core) == []


def test_a_segment_with_a_leased_suffix_is_not_emptied() -> None:
    core = core_of(1, 1)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", PAGE)
    keys = chain("x", 2)
    save(core, first, keys)
    found = core.reading.lookup(1, first, keys[1:], lease=True)
    assert outcomes(core.writing.reserve(2, second, bytes(16), [key("y")])) == [Outcome.NO_SPACE]
    core.reading.release(1, found.lease)
    core.tick(1.0)
    assert outcomes(core.writing.reserve(2, second, bytes(16), [key("y")])) == [Outcome.GRANTED]
    assert wrong_core(core) == []


def test_emptying_a_segment_takes_suffixes_elsewhere_along() -> None:
    core = core_of(3, 3)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", PAGE)
    keys = chain("x", 6)
    save(core, first, keys)
    assert outcomes(core.writing.reserve(2, second, bytes(16), [key("y")])) == [Outcome.GRANTED]
    assert present(core, first, keys) in ([], keys[:3])
    assert wrong_core(core) == []


@pytest.mark.timeout(20)
@pytest.mark.slow
def test_emptying_a_segment_of_long_prefixes_is_quick() -> None:
    core = core_of(100, 100)
    first, second = core.open_namespace("a", 64), core.open_namespace("b", PAGE)
    for number in range(5):
        save(core, first, chain(f"x{number}", 20_000))
    assert outcomes(core.writing.reserve(2, second, bytes(16), [key("y")])) == [Outcome.GRANTED]


def test_more_namespaces_than_segments_take_turns_when_idle() -> None:
    core = core_of(2, 2)
    numbers = [core.open_namespace(name, PAGE) for name in "abc"]
    for number in numbers[:2]:
        save(core, number, chain("x", 2))
    core.reading.lookup(1, numbers[1], chain("x", 1), lease=True)
    assert outcomes(save(core, numbers[2], [key("y")])) == [Outcome.NO_SPACE]
    core.tick(5.0)
    save(core, numbers[1], chain("x", 2))
    core.tick(11.0)
    assert outcomes(save(core, numbers[2], [key("y")])) == [Outcome.GRANTED]
    assert present(core, numbers[0], chain("x", 2)) == []
    assert present(core, numbers[1], chain("x", 2)) == chain("x", 2)
    assert wrong_core(core) == []


def test_a_segment_that_was_never_touched_enough_is_not_passed_around() -> None:
    core = core_of(1, 1, touched=False)
    core.slots.touch(0, segment_for(1))
    core.slots.touch(1, 4096)
    core.slots.touching_ended()
    first, second = core.open_namespace("a", 4096), core.open_namespace("b", PAGE)
    saved = save(core, first, chain("x", 40))
    assert outcomes(saved).count(Outcome.GRANTED) > 0
    assert {assigned.segment for assigned in saved.assigned} == {0}
    refused = core.writing.reserve(2, second, bytes(16), [key("y")])
    assert outcomes(refused) == [Outcome.NO_SPACE]
    assert refused.assigned == []


# The watermark


def test_above_the_watermark_the_whole_ratio_leaves_in_steps() -> None:
    core = core_of(2000, high_watermark=0.9, eviction_ratio=0.6)
    namespace = core.open_namespace("a", PAGE)
    for number in range(1801):
        save(core, namespace, [key(number)])
    left = [core.stats()["bytes_used"] // PAGE]  # type: ignore[operator]
    for second in range(1, 5):
        core.tick(float(second))
        left.append(core.stats()["bytes_used"] // PAGE)  # type: ignore[operator]
    assert left == [1801 - 1024, 601, 601, 601, 601]


def test_below_the_watermark_nothing_leaves() -> None:
    core = core_of(20, high_watermark=0.9, eviction_ratio=0.5)
    namespace = core.open_namespace("a", PAGE)
    keys = chain("x", 18)
    save(core, namespace, keys)
    core.tick(1.0)
    assert present(core, namespace, keys) == keys


def test_the_least_recently_loaded_leaves_first_and_probing_is_no_use() -> None:
    core = core_of(3)
    namespace = core.open_namespace("a", PAGE)
    pages = [key(number) for number in range(3)]
    for one in pages:
        save(core, namespace, [one])
    core.reading.release(1, core.reading.lookup(1, namespace, [pages[0]], lease=True).lease)
    core.reading.lookup(1, namespace, [pages[1]], lease=False)
    save(core, namespace, [key("new")])
    assert present(core, namespace, pages) == [pages[0], pages[2]]


# Namespaces


def test_one_name_has_one_page_size() -> None:
    core = core_of(2)
    number = core.open_namespace("a", PAGE)
    assert core.open_namespace("a", PAGE) == number
    with pytest.raises(PoolRefused, match="has pages of 65536 bytes, but 4096 were asked for"):
        core.open_namespace("a", 4096)


@pytest.mark.parametrize("size", [0, -1, 1 << 40, 1 << 70])
def test_a_page_that_never_fits_is_refused(size: int) -> None:
    with pytest.raises(NoSpace, match="does not fit in a segment"):
        core_of(2).open_namespace("a", size)


@pytest.mark.parametrize("name", ["", "x" * 513, "a\nb", "a\x1b[31m"])
def test_an_unfit_name_is_refused(name: str) -> None:
    with pytest.raises(PoolRefused, match="expected 1 to 512 printable ones"):
        core_of(2).open_namespace(name, PAGE)


def test_the_number_of_namespaces_is_bounded() -> None:
    core = core_of(2)
    for number in range(4096):
        core.open_namespace(str(number), PAGE)
    with pytest.raises(PoolRefused, match="takes no more"):
        core.open_namespace("one more", PAGE)
    assert core.open_namespace("7", PAGE) == 7


def test_a_namespace_that_was_not_opened_is_stale() -> None:
    core = core_of(2)
    for number in (-1, 0, 5):
        with pytest.raises(StaleReference, match="is not open"):
            core.reading.lookup(1, number, [], lease=False)


def test_equal_keys_of_two_namespaces_never_meet() -> None:
    core = core_of(2, 2)
    first, second = core.open_namespace("a", PAGE), core.open_namespace("b", PAGE)
    save(core, first, [key("x")])
    assert present(core, second, [key("x")]) == []


def test_a_tail_with_more_tokens_than_its_page_has_bytes_is_refused() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", 64)
    large, fits = Tail(key("d"), bytes(68)), Tail(key("d"), bytes(64))
    with pytest.raises(PoolRefused, match="a tail of 68 bytes of tokens, expected at most the 64 bytes of a page"):
        core.writing.refuse_unfit_tail(namespace, large.key, large)
    core.writing.refuse_unfit_tail(namespace, fits.key, fits)


# Holding


def test_what_another_owner_holds_is_out_of_reach() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    save(core, namespace, [key("x")])
    reserved = core.writing.reserve(1, namespace, bytes(16), [key("y")])
    found = core.reading.lookup(1, namespace, [key("x")], lease=True)
    with pytest.raises(StaleReference):
        core.reading.release(2, found.lease)
    with pytest.raises(StaleReference):
        core.writing.commit(2, reserved.reservation)
    with pytest.raises(StaleReference):
        core.writing.abort(2, reserved.reservation)
    assert wrong_core(core) == []


def test_a_key_twice_in_one_reservation_is_written_once() -> None:
    core = core_of(2)
    namespace = core.open_namespace("a", PAGE)
    reserved = core.writing.reserve(1, namespace, bytes(16), [key("x"), key("x")])
    assert outcomes(reserved) == [Outcome.GRANTED, Outcome.WRITING]
    assert len(core.writing.commit(1, reserved.reservation, [0, 0]).pages) == 1
    found = core.reading.lookup(1, namespace, [key("x"), key("x")], lease=True)
    core.reading.release(1, found.lease)
    assert wrong_core(core) == []


def test_the_slots_of_a_cut_off_writer_rest_until_it_is_dead() -> None:
    core = core_of(1)
    namespace = core.open_namespace("a", PAGE)
    core.writing.reserve(1, namespace, bytes(16), [key("x")])
    core.disconnect(1, 0.0, alive=True)
    assert core.deferred.awaits(writer_of(1))
    assert outcomes(core.writing.reserve(2, namespace, bytes(16), [key("y")])) == [Outcome.NO_SPACE]
    core.deferred.stopped(writer_of(1))
    assert outcomes(core.writing.reserve(2, namespace, bytes(16), [key("y")])) == [Outcome.GRANTED]


def test_the_slots_of_a_dead_writer_are_free_at_once() -> None:
    core = core_of(1)
    namespace = core.open_namespace("a", PAGE)
    core.writing.reserve(1, namespace, bytes(16), [key("x")])
    core.disconnect(1, 0.0, alive=False)
    assert outcomes(core.writing.reserve(2, namespace, bytes(16), [key("x")])) == [Outcome.GRANTED]


def test_untouched_memory_is_not_handed_out() -> None:
    core = core_of(4, touched=False)
    namespace = core.open_namespace("a", PAGE)
    assert outcomes(save(core, namespace, chain("x", 1))) == [Outcome.NOT_TOUCHED]
    core.slots.touch(0, segment_for(2))
    assert outcomes(save(core, namespace, chain("x", 3))) == [Outcome.GRANTED, Outcome.GRANTED, Outcome.NOT_TOUCHED]
    core.slots.touching_ended()
    assert outcomes(save(core, namespace, chain("y", 2))) == [Outcome.GRANTED, Outcome.GRANTED]
    assert wrong_core(core) == []


def test_pending_tells_being_written_from_absent() -> None:
    core = core_of(4)
    namespace = core.open_namespace("a", PAGE)
    keys = chain("x", 4)
    save(core, namespace, keys[:1])
    core.writing.reserve(1, namespace, keys[0], keys[1:3])
    found = core.reading.lookup(2, namespace, keys, lease=False)
    assert (len(found.pages), found.pending, found.lease) == (1, 2, 0)


def test_figures_count_what_happened() -> None:
    core = PoolCore([segment_for(2)], high_watermark=1.0)
    core.slots.touch(0, segment_for(2))
    namespace = core.open_namespace("a", PAGE)
    keys = chain("x", 3)
    save(core, namespace, keys)
    core.writing.reserve(1, namespace, bytes(16), keys)
    core.reading.lookup(1, namespace, keys, lease=True)
    core.disconnect(1, 0.0, alive=True)
    counters = core.stats()["counters"]
    assert isinstance(counters, dict)
    assert {name: value for name, value in counters.items() if value} == {
        "pages_committed": 2,
        "refused_no_space": 2,
        "already_present": 2,
        "lookups": 1,
        "keys_looked_up": 3,
        "keys_hit": 2,
        "leases_lost": 1,
    }


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_keys_that_travelled_together_are_told_apart(keys: list[bytes]) -> None:
    found = split_keys(b"".join(keys))
    assert found == keys
    assert {type(one) for one in found} <= {bytes}


def test_slots_of_a_writer_that_hangs_rest_until_it_is_back() -> None:
    core = core_of(segment_for(2))
    namespace = core.open_namespace("n", PAGE)
    core.writing.reserve(1, namespace, key(0), [key(1)])
    core.disconnect(1, 0.0, alive=True)
    for now in (1.0, REPLACE_SECONDS + 2, 1e6):
        core.tick(now)
    assert core.deferred.awaits(writer_of(1)), "its thread may still write into them"
    core.deferred.stopped(writer_of(1))
    assert wrong_core(core) == []
    assert core.stats()["slots_resting"] == 0
