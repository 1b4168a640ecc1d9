"""What a host tells others of hot pages and copies of theirs: how much, when, and while a namespace is cleared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ems.pool.keys import NO_PARENT, Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.movement.speed import Samples
from ems.pool.tiers.answers import KeyRun, Unknown
from ems.pool.tiers.copying_ahead import (
    BURST,
    BURST_SECONDS,
    KNOWN_SECONDS,
    MOST_ROUND_KEYS,
    ROUND_SECONDS,
    UNUSED_SHARE,
    CopyingAhead,
)

CLEARED, OTHER = "t/m/cleared", "t/m/other"
ROOT = bytes(NO_PARENT)
PAGE, MEMORY = 1 << 20, 1 << 32


class Stored(msgspec.Struct, frozen=True):
    key: bytes
    parent: Any = None
    tail: Tail | None = None


class Spaces(list[Any]):
    def opened(self, number: int) -> object:
        return self[number]


class Host:
    """One whose cluster is asked when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held_back: set[str] = set()
        self.told: list[dict[str, list[HotRun]]] = []
        self.asked: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.heard: dict[str, list[HotRun]] = {}
        self.brought: list[str] = []
        self.memory: set[bytes] = set()
        self.idle = True
        """Whether nothing is fetched."""
        self.room = 1 << 20
        """Pages for which none has to leave."""
        self.full: set[str] = set()
        self.fetched = Samples(None)
        self.questions: list[int] = []
        self.unanswered = False
        state: Any = SimpleNamespace(
            config=SimpleNamespace(copy_ahead="on_save"),
            counts=Counter[str](),
            due=lambda pages, *_: pages,
            number=0,
            reading=SimpleNamespace(open=True),
            reads=True,
            speed=SimpleNamespace(fetched=self.fetched),
            tier=self,
        )
        spaces = Spaces(SimpleNamespace(name=name, last_used=0.0, page_size=PAGE) for name in (CLEARED, OTHER))
        core: Any = SimpleNamespace(
            draining=False,
            find_namespace=(CLEARED, OTHER).index,
            named=lambda number: ((CLEARED, OTHER)[number], PAGE),
            namespaces=spaces,
            now=0.0,
            reclaimer=SimpleNamespace(idle_room=lambda one: 0 if one.name in self.full else self.room),
            slots=SimpleNamespace(total=MEMORY),
            page=lambda _, key: key if key in self.memory else None,
        )
        self.ahead = CopyingAhead(
            state,
            core,
            lambda _state, question, then: self.asked.append((question, then)),
            self.bring,
            lambda: self.idle,
            lambda name: name not in self.held_back,
            lambda: self.now,
            lambda: 0.0,
        )

    def share_hot(self, told: Mapping[str, Sequence[HotRun]]) -> dict[str, list[HotRun]]:
        self.told.append({name: list(runs) for name, runs in told.items() if runs})
        return self.heard

    def unknown(self, _name: str, keys: Sequence[bytes]) -> Unknown:
        self.questions.append(len(keys))
        return Unknown(0, list(keys) if self.unanswered else [], [])

    def ask(self, _name: str, _keys: Sequence[bytes]) -> None: ...

    def holds(self, _name: str, keys: Sequence[bytes]) -> int:
        return len(keys)

    def bring(self, _tier: int, number: int, run: KeyRun) -> bool:
        self.brought.append((CLEARED, OTHER)[number])
        self.memory.update(run.keys)
        return True

    def clear(self) -> None:
        self.held_back = {CLEARED}
        self.ahead.clear(lambda name: name == CLEARED)

    def begin(self) -> None:
        self.now += 20 * ROUND_SECONDS
        self.ahead.step()

    def end(self) -> set[str]:
        """Of which namespaces the round told."""
        question, then = self.asked.pop()
        question()
        then()
        return set(self.told[-1])

    def tick(self, seconds: float = 0.1) -> int:
        """How many pages that brings."""
        before = len(self.memory)
        self.now += seconds
        self.ahead.step()
        return len(self.memory) - before


def save(host: Host) -> None:
    for name in (CLEARED, OTHER):
        host.ahead.written(name, [Stored(b"k" * 16, ROOT)])  # type: ignore[list-item]


def test_what_is_saved_while_a_namespace_is_cleared_is_not_told() -> None:
    host = Host()
    host.clear()
    save(host)
    for name in (CLEARED, OTHER):
        host.ahead.used(name, [Stored(b"u" * 16)])  # type: ignore[list-item]
    host.held_back.clear()
    host.begin()
    assert host.end() == {OTHER}


@pytest.mark.parametrize("let_in", [False, True])
def test_a_round_that_waits_does_not_tell_what_is_cleared_meanwhile(*, let_in: bool) -> None:
    host = Host()
    save(host)
    host.begin()
    host.clear()
    if let_in:
        host.held_back.clear()
    assert host.end() == {OTHER}


def test_what_is_cleared_is_not_copied_either() -> None:
    host = Host()
    host.heard = {name: [HotRun(ROOT, b"h" * 16)] for name in (CLEARED, OTHER)}
    host.begin()
    host.held_back = {CLEARED}
    host.end()
    host.ahead.step()
    assert host.brought == [OTHER]


def test_what_was_heard_and_is_cleared_then_is_not_copied() -> None:
    host = Host()
    host.heard = {name: [HotRun(ROOT, b"h" * 16)] for name in (CLEARED, OTHER)}
    host.begin()
    host.end()
    host.clear()
    host.ahead.step()
    assert host.brought == [OTHER]


def listed(count: int, first: int = 0, each: int = 100) -> list[HotRun]:
    keys = [number.to_bytes(16, "big") for number in range(first + 1, first + count + 1)]
    parts = [keys[at : at + each] for at in range(0, count, each)]
    return [HotRun(keys[at * each - 1] if at else ROOT, b"".join(part)) for at, part in enumerate(parts)]


def test_copies_are_begun_a_burst_at_a_time_and_only_while_nothing_else_is_fetched() -> None:
    host = Host()
    host.heard = {OTHER: listed(300)}
    host.idle = False
    host.begin()
    host.end()
    assert (host.questions, host.tick()) == ([], 0), "the master is not asked either"
    host.idle = True
    host.begin()
    host.end()
    host.idle = False
    assert host.tick() == 0
    host.idle = True
    burst = BURST // PAGE
    assert [host.tick() for _ in range(300 // burst + 2)] == [burst] * (300 // burst) + [300 % burst, 0]


def test_over_a_slow_link_a_burst_takes_as_long_as_over_a_fast_one() -> None:
    host = Host()
    host.heard = {OTHER: listed(300)}
    for size in range(1, 10):
        host.fetched.add(size * PAGE, size * BURST_SECONDS / 4, 0.0)
    host.fetched.line(0.0)
    host.begin()
    host.end()
    assert [host.tick() for _ in range(3)] == [4, 4, 4]


def rounds(host: Host, count: int = 1) -> None:
    for _ in range(count):
        host.now += ROUND_SECONDS
        host.tick()
        host.end()
        for _ in range(100):
            host.tick(0.001)


def test_copies_that_nobody_uses_take_a_bounded_part_of_memory() -> None:
    host = Host()
    most = MEMORY // UNUSED_SHARE // PAGE
    host.heard = {OTHER: listed(3 * most)}
    rounds(host, 2)
    assert len(host.memory) == most
    used: Any = [Stored(key) for key in sorted(host.memory)[:10]]
    host.ahead.used(OTHER, used)
    rounds(host)
    assert len(host.memory) == most + 10
    host.questions.clear()
    rounds(host)
    assert len(host.memory) == most + 10
    assert host.questions == [], "the master is not asked for what may not be copied"


def test_no_more_is_asked_for_and_copied_than_finds_room() -> None:
    host = Host()
    host.heard = {OTHER: listed(300)}
    host.room = 40
    host.begin()
    host.end()
    assert (host.questions, host.tick()) == ([40], BURST // PAGE)
    host.room = 0
    rounds(host, 2)
    assert (len(host.memory), host.questions) == (BURST // PAGE, [40])


def test_lists_that_are_too_long_for_one_round_take_turns() -> None:
    host = Host()
    host.heard = {CLEARED: listed(MOST_ROUND_KEYS, each=1), OTHER: listed(64, 10_000)}
    host.memory.update(run.last for run in host.heard[CLEARED])
    rounds(host, 3)
    assert host.brought[0] == OTHER


def test_the_list_of_who_has_no_room_keeps_nobody_out() -> None:
    host = Host()
    host.full.add(CLEARED)
    host.heard = {CLEARED: listed(MOST_ROUND_KEYS), OTHER: listed(64, 10_000)}
    rounds(host, 2)
    assert host.brought[:1] == [OTHER]


def test_namespaces_take_turns_and_what_waits_too_long_is_asked_for_again() -> None:
    host, burst = Host(), BURST // PAGE
    host.heard = {CLEARED: listed(4 * burst), OTHER: listed(4 * burst, 10_000)}
    host.begin()
    host.end()
    assert [host.tick() for _ in range(4)] == [burst] * 4
    assert host.brought == [CLEARED, OTHER] * 2
    host.idle = False
    host.tick(2 * KNOWN_SECONDS)
    host.idle = True
    asked = len(host.questions)
    assert host.tick() == 0, "the cluster may have it no more"
    host.end()
    assert len(host.questions) > asked
    assert host.tick() == burst


def test_what_is_answered_behind_a_clear_is_not_copied() -> None:
    host = Host()
    host.unanswered = True
    host.heard = {CLEARED: [HotRun(ROOT, b"h" * 16)]}
    host.begin()
    host.end()
    ((_, answered),) = host.asked
    host.clear()
    host.held_back.clear()
    answered()
    assert host.tick() == 0
