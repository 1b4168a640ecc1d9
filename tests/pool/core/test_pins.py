"""Pins and announcements: how much they cover, and when they end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.pins import (
    ANNOUNCED_SECONDS,
    ANNOUNCEMENT_WEIGHT,
    MAX_ANNOUNCED_EACH,
    MAX_ANNOUNCED_TENANT,
    MAX_PIN_SECONDS,
    Announcements,
    PinSet,
)
from tests.pool.brain import chain, core_of, key, present, save
from tests.pool.wrong_core import wrong_announcements, wrong_core


def test_pins_cover_half_a_namespace_and_end_in_time() -> None:
    core = core_of(8)
    namespace = core.open_namespace("a", 64 << 10)
    keys = chain("x", 8)
    save(core, namespace, keys)
    assert core.pin(namespace, keys, 5.0) == 4
    assert core.pin(namespace, keys[:4], 9.0) == 4
    save(core, namespace, chain("y", 8))
    assert present(core, namespace, keys) == keys[:4]
    assert core.namespaces[namespace].pins.unpin(keys) == 4
    save(core, namespace, chain("z", 8))
    assert present(core, namespace, keys) == []


def test_a_pin_ends_by_itself() -> None:
    core = core_of(4)
    namespace = core.open_namespace("a", 64 << 10)
    save(core, namespace, [key("pinned")])
    assert core.pin(namespace, [key("pinned"), key("absent")], float("inf")) == 1
    core.tick(MAX_PIN_SECONDS - 1)
    save(core, namespace, chain("y", 4))
    assert present(core, namespace, [key("pinned")])
    core.tick(MAX_PIN_SECONDS)
    save(core, namespace, chain("z", 4))
    assert not present(core, namespace, [key("pinned")])


def test_what_is_announced_stays_until_it_is_withdrawn() -> None:
    core = core_of(6)
    namespace = core.open_namespace("a", 64 << 10)
    keys = chain("x", 3)
    save(core, namespace, keys)
    number = core.announce(7, namespace, keys, 0.0)
    for name in "bcd":
        save(core, namespace, chain(name, 3))
    assert present(core, namespace, keys) == keys
    core.announcements.withdraw(8, number)
    save(core, namespace, chain("e", 3))
    assert present(core, namespace, keys) == keys, "another client withdrew it"
    core.announcements.withdraw(7, number)
    core.announcements.withdraw(7, number)
    for name in "fgh":
        save(core, namespace, chain(name, 3))
    assert present(core, namespace, keys) == []


def test_announcements_never_cost_a_writer_its_room() -> None:
    core = core_of(4)
    namespace = core.open_namespace("a", 64 << 10)
    keys = chain("x", 4)
    save(core, namespace, keys)
    core.announce(7, namespace, keys, 0.0)
    assert len(save(core, namespace, chain("y", 4)).granted) == 4
    assert wrong_core(core) == []


def test_an_announcement_ends_with_its_owner_and_after_a_time() -> None:
    announcements, kept = Announcements(), PinSet()
    announcements.announce(1, 1, kept, chain("a", 2), 0.0)
    announcements.announce(2, 2, kept, chain("a", 3), 1.0)
    announcements.leave(1)
    assert kept.awaited == dict.fromkeys(chain("a", 3), 1)
    announcements.tick(ANNOUNCED_SECONDS + 0.5)
    assert len(announcements) == 1
    announcements.tick(ANNOUNCED_SECONDS + 1.0)
    assert (len(announcements), kept.awaited) == (0, {})


def test_an_owner_that_announces_without_end_loses_the_oldest() -> None:
    announcements, kept = Announcements(), PinSet()
    keys = chain("x", 1024 - ANNOUNCEMENT_WEIGHT)
    for number in range(MAX_ANNOUNCED_EACH // 1024 + 1):
        announcements.announce(number + 1, 1, kept, keys, 0.0)
    assert not announcements.withdraw(1, 1)
    assert announcements.withdraw(1, 2)
    assert wrong_announcements(announcements) == []


def test_announcements_of_nothing_are_not_without_end() -> None:
    announcements = Announcements()
    for number in range(2 * MAX_ANNOUNCED_EACH // ANNOUNCEMENT_WEIGHT):
        announcements.announce(number, 1, PinSet(), [], 0.0)
    assert len(announcements) == MAX_ANNOUNCED_EACH // ANNOUNCEMENT_WEIGHT


def test_a_tenant_that_announces_without_end_takes_nothing_from_another() -> None:
    announcements, ann, bob = Announcements(), PinSet("ann"), PinSet("bob")
    announcements.announce(1, 1, bob, chain("b", 3), 0.0)
    keys = chain("x", MAX_ANNOUNCED_EACH - ANNOUNCEMENT_WEIGHT)
    for number in range(2, 9):
        announcements.announce(number, number, ann, keys, 0.0)
    assert len(announcements) == 1 + MAX_ANNOUNCED_TENANT // MAX_ANNOUNCED_EACH
    assert announcements.withdraw(1, 1), "that of the other tenant ended"
    assert wrong_announcements(announcements) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("awlt"), st.integers(0, 3), st.lists(st.integers(0, 6), max_size=4)), max_size=60
    )
)
def test_awaited_keys_are_those_of_the_announcements(history: list[tuple[str, int, list[int]]]) -> None:
    announcements, spaces = Announcements(), [PinSet(), PinSet()]
    now = 0.0
    for number, (step, client_id, names) in enumerate(history, start=1):
        if step == "a":
            announcements.announce(number, client_id, spaces[client_id % 2], [key(name) for name in names], now)
        elif step == "w":
            announcements.withdraw(client_id, len(names) + 1)
        elif step == "l":
            announcements.leave(client_id)
        else:
            now += ANNOUNCED_SECONDS / 3
            announcements.tick(now)
        assert wrong_announcements(announcements) == []
    announcements.tick(now + ANNOUNCED_SECONDS)
    assert not len(announcements)
    assert not any(ns.awaited for ns in spaces)
