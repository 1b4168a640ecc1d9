"""Copies that nobody used: whatever is done, they hold no more than their bound, and each tenant its part."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.movement import unused_copies
from ems.pool.movement.unused_copies import LOOK_SECONDS, UnusedCopies
from ems.pool.names import MARK, tenant_of

NS = "t/m/l"
TENANT_SPACES = [f"{MARK}{tenant}/t/m/l" for tenant in ("a", "b")]
keys = st.lists(st.integers(0, 20).map(lambda number: number.to_bytes(16, "big")), max_size=6, unique=True)
spaces = st.sampled_from([NS, *TENANT_SPACES])
SIZES = dict(zip([NS, *TENANT_SPACES], (1, 3, 2), strict=True))
MOST, TENANTS = 20, 2


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_what_was_used_makes_room_for_more() -> None:
    copies = UnusedCopies()
    assert copies.room(NS, 2, 10) == 5
    copies.add(NS, map(key, range(4)), 2, 0.0)
    assert copies.room(NS, 2, 10) == 1
    assert copies.discard(NS, [key(0), key(9)]) == 1
    assert copies.discard(NS, [key(0)]) == 0
    assert copies.room(NS, 2, 10) == 2
    assert not copies.has(NS, key(0))
    assert copies.has(NS, key(1))


def test_what_left_memory_makes_room_once_it_is_looked_for() -> None:
    copies = UnusedCopies()
    copies.add(NS, map(key, range(10)), 1, 0.0)
    copies.look(lambda *_: False, LOOK_SECONDS / 2)
    assert copies.room(NS, 1, 10) == 0, "it may be on its way"
    copies.look(lambda _, one: one == key(3), LOOK_SECONDS)
    assert copies.room(NS, 1, 10) == 9
    copies.look(lambda *_: False, 1.5 * LOOK_SECONDS)
    assert copies.has(NS, key(3))
    copies.look(lambda *_: False, 2 * LOOK_SECONDS)
    assert copies.room(NS, 1, 10) == 10


def test_a_page_larger_than_the_part_of_its_tenant_is_not_copied() -> None:
    copies = UnusedCopies()
    assert copies.room(NS, 11, 10) == 0
    assert copies.room(NS, 5, 10) == 2
    assert copies.room(NS, 5, 10, 2) == 1


def test_who_comes_later_has_no_more_than_what_is_left() -> None:
    copies = UnusedCopies()
    copies.add(NS, map(key, range(8)), 1, 0.0)
    assert copies.room(TENANT_SPACES[0], 1, 10, 2) == 2


class Copying(RuleBasedStateMachine):
    """Beside what is copied, what really is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = UnusedCopies()
        self.now = 0.0
        self.unused: set[tuple[str, bytes]] = set()
        self.memory: set[tuple[str, bytes]] = set()

    @rule(seconds=st.floats(0, LOOK_SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(space=spaces, some=keys)
    def copy(self, space: str, some: list[bytes]) -> None:
        missing = [one for one in some if (space, one) not in self.memory]
        part = missing[: self.copies.room(space, SIZES[space], MOST, TENANTS)]
        self.copies.add(space, part, SIZES[space], self.now)
        names = {(space, one) for one in part}
        self.unused |= names
        self.memory |= names

    @rule(space=spaces, some=keys)
    def use(self, space: str, some: list[bytes]) -> None:
        names = {(space, one) for one in some}
        assert self.copies.discard(space, some) >= len(names & self.unused & self.memory)
        self.unused -= names

    @rule(space=spaces, some=keys)
    def evict(self, space: str, some: list[bytes]) -> None:
        self.memory -= {(space, one) for one in some}

    @rule(space=spaces)
    def clear(self, space: str) -> None:
        self.copies.clear(lambda name: name == space)
        self.unused = {name for name in self.unused if name[0] != space}

    @rule()
    def look(self) -> None:
        self.copies.look(lambda *name: name in self.memory, self.now)

    @invariant()
    def is_bounded(self) -> None:
        held = self.unused & self.memory
        for space, size in SIZES.items():
            own = sum(size for name, _ in held if name == space)
            assert own <= MOST // TENANTS
            assert own <= self.copies._bytes[tenant_of(space)] or not own
        assert sum(SIZES[name] for name, _ in held) <= MOST
        assert all(self.copies.has(*name) for name in held)
        assert len(self.copies._pages) <= unused_copies.MOST_UNUSED
        assert self.copies._bytes.total() == sum(copy.size for copy in self.copies._pages.values())


TestCopying = Copying.TestCase


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_copies, "MOST_UNUSED", 4)
    copies = UnusedCopies()
    assert copies.room(NS, 1, 10) == 4
    copies.add(NS, map(key, range(4)), 1, 0.0)
    assert copies.room(NS, 1, 10) == 0
