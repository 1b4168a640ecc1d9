"""What a host tells others of hot pages while an administrator clears a namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ems.pool.keys import NO_PARENT, Tail
from ems.pool.movement.hot_list import HotRun
from ems.pool.tiers.answers import Unknown
from ems.pool.tiers.copying_ahead import ROUND_SECONDS, CopyingAhead

CLEARED, OTHER = "t/m/cleared", "t/m/other"
ROOT = bytes(NO_PARENT)


class Stored(msgspec.Struct, frozen=True):
    key: bytes
    parent: Any = None
    tail: Tail | None = None


class Host:
    """One whose cluster is asked when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held_back: set[str] = set()
        self.told: list[dict[str, list[HotRun]]] = []
        self.asked: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.heard: dict[str, list[HotRun]] = {}
        self.brought: list[str] = []
        state: Any = SimpleNamespace(
            config=SimpleNamespace(copy_ahead="on_save"),
            counts=Counter[str](),
            due=lambda pages, *_: pages,
            number=0,
            reading=SimpleNamespace(open=True),
            reads=True,
            tier=self,
        )
        spaces = [SimpleNamespace(name=name, last_used=0.0) for name in (CLEARED, OTHER)]
        core: Any = SimpleNamespace(
            draining=False,
            find_namespace=(CLEARED, OTHER).index,
            named=lambda number: ((CLEARED, OTHER)[number], 1),
            namespaces=spaces,
            now=0.0,
            page=lambda *_: None,
        )
        self.ahead = CopyingAhead(
            state,
            core,
            1 << 30,
            lambda _state, question, then: self.asked.append((question, then)),
            self.bring,
            lambda name: name not in self.held_back,
            lambda: self.now,
        )

    def share_hot(self, told: Mapping[str, Sequence[HotRun]]) -> dict[str, list[HotRun]]:
        self.told.append({name: list(runs) for name, runs in told.items() if runs})
        return self.heard

    def unknown(self, _name: str, _keys: Sequence[bytes]) -> Unknown:
        return Unknown(0, [], [])

    def holds(self, _name: str, keys: Sequence[bytes]) -> int:
        return len(keys)

    def bring(self, _tier: int, number: int, _run: object) -> bool:
        self.brought.append((CLEARED, OTHER)[number])
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
    assert host.brought == [OTHER]
