"""Pins and announcements: how much they cover, and when they end."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.handover import CoreState
from ems.pool.core.kept import ANNOUNCED_SECONDS, MAX_ANNOUNCED_EACH, MAX_PIN_SECONDS, Announcements, Kept
from tests.pool.brain import chain, core_of, key, present, save


def test_pins_cover_half_a_namespace_and_end_in_time() -> None:
    core = core_of(8)
    namespace = core.open_namespace("a", 64 << 10)
    keys = chain("x", 8)
    save(core, namespace, keys)
    assert core.pin(namespace, keys, 5.0) == 4
    assert core.pin(namespace, keys[:4], 9.0) == 4
    save(core, namespace, chain("y", 8))
    assert present(core, namespace, keys) == keys[:4]
    assert core.unpin(namespace, keys) == 4
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
    core.withdraw(8, number)
    save(core, namespace, chain("e", 3))
    assert present(core, namespace, keys) == keys, "another client withdrew it"
    core.withdraw(7, number)
    core.withdraw(7, number)
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
    assert core.check() == []


def test_an_announcement_ends_with_its_owner_and_after_a_time() -> None:
    announcements, kept = Announcements(), Kept()
    announcements.announce(1, 1, kept, chain("a", 2), 0.0)
    announcements.announce(2, 2, kept, chain("a", 3), 1.0)
    announcements.leave(1)
    assert kept.awaited == dict.fromkeys(chain("a", 3), 1)
    announcements.tick(ANNOUNCED_SECONDS + 0.5)
    assert len(announcements) == 1
    announcements.tick(ANNOUNCED_SECONDS + 1.0)
    assert (len(announcements), kept.awaited) == (0, {})


def test_an_owner_that_announces_without_end_loses_the_oldest() -> None:
    announcements, kept = Announcements(), Kept()
    keys = chain("x", 1024)
    for number in range(MAX_ANNOUNCED_EACH // 1024 + 1):
        announcements.announce(number + 1, 1, kept, keys, 0.0)
    assert not announcements.withdraw(1, 1)
    assert announcements.withdraw(1, 2)
    assert announcements.check() == []


@given(
    st.lists(
        st.tuples(st.sampled_from("awlt"), st.integers(0, 3), st.lists(st.integers(0, 6), max_size=4)), max_size=60
    )
)
def test_awaited_keys_are_those_of_the_announcements(history: list[tuple[str, int, list[int]]]) -> None:
    announcements, spaces = Announcements(), [Kept(), Kept()]
    now = 0.0
    for number, (step, owner, names) in enumerate(history, start=1):
        if step == "a":
            announcements.announce(number, owner, spaces[owner % 2], [key(name) for name in names], now)
        elif step == "w":
            announcements.withdraw(owner, len(names) + 1)
        elif step == "l":
            announcements.leave(owner)
        else:
            now += ANNOUNCED_SECONDS / 3
            announcements.tick(now)
        assert announcements.check() == []
    announcements.tick(now + ANNOUNCED_SECONDS)
    assert not len(announcements)
    assert not any(space.awaited for space in spaces)


def test_what_is_announced_stays_over_a_hand_over() -> None:
    core, successor = core_of(6), core_of(6)
    namespace = core.open_namespace("a", 64 << 10)
    keys = chain("x", 3)
    save(core, namespace, keys)
    withdrawn, left = core.announce(7, namespace, keys, 0.0), core.announce(8, namespace, keys[:1], 5.0)
    core.announce(9, namespace, [], 5.0)
    successor.resume(msgspec.msgpack.decode(msgspec.msgpack.encode(core.snapshot()), type=CoreState))
    assert successor.check() == []
    for name in "bcd":
        save(successor, namespace, chain(name, 3))
    assert present(successor, namespace, keys) == keys
    assert successor.announce(7, namespace, keys, 6.0) not in (withdrawn, left), "numbers go on"
    successor.tick(ANNOUNCED_SECONDS)
    successor.disconnect(8, ANNOUNCED_SECONDS, alive=False)
    assert successor.namespaces[namespace].kept.awaited == dict.fromkeys(keys, 1), "the second of 7 is left"
    assert successor.check() == []
