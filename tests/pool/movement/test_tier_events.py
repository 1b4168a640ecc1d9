"""What others are told of a tier: of pages that come, and of those that are found missing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.changes import ASKED_SECONDS, ChangeLog
from ems.pool.media import STORAGE, named
from ems.pool.movement import tier_events as module
from ems.pool.movement.tier_events import AGAIN_SECONDS, TierEvents
from ems.pool.protocol.messages import FROM_NOW, ChangeRun
from tests.pool.brain import key

NAMES = [named("a", STORAGE)]


class Bench:
    """A medium, the pages that are there, and somebody who asks for changes."""

    def __init__(self) -> None:
        self.log = ChangeLog()
        self.there: set[bytes] = set()
        self.events = TierEvents(self.log, STORAGE, lambda _name, one, _heard: one in self.there)
        self._place = self.log.since(FROM_NOW, NAMES, 0.0)[0]

    def see(self, *names: str, now: float = 0.0) -> None:
        self.there.update(map(key, names))
        self.events.seen("a", [key(name) for name in names], now)

    def news(self) -> list[tuple[bool, bytes]]:
        self._place, lost, runs = self.log.since(self._place, NAMES, 0.0)
        assert not lost
        return [(run.stored, run.keys) for run in runs]


def test_a_page_is_told_of_and_taken_back_once_when_it_is_not_found_any_more() -> None:
    bench = Bench()
    bench.see("1", "2")
    bench.see("1")
    assert bench.news() == [(True, key("1") + key("2"))]
    bench.events.look()
    assert bench.news() == []
    bench.there.discard(key("1"))
    bench.events.look()
    assert bench.news() == [(False, key("1"))]
    bench.see("1")
    assert bench.news() == [(True, key("1"))]


def test_who_asks_later_is_told_of_a_page_when_it_is_heard_of_again() -> None:
    bench = Bench()
    bench.see("1", "2")
    bench.news()
    bench.see("1", now=AGAIN_SECONDS - 0.1)
    assert bench.news() == []
    bench.see("1", now=AGAIN_SECONDS)
    assert bench.news() == [(True, key("1"))]


def test_what_turned_out_to_be_missing_is_taken_back_at_once() -> None:
    bench = Bench()
    bench.see("1", "2")
    bench.news()
    bench.there.discard(key("2"))
    bench.events.missed("a", [key("1"), key("2"), key("never told")])
    assert bench.news() == [(False, key("2"))]


def test_who_asks_again_whether_a_missed_page_is_there_does_not_go_by_when_it_was_heard_of() -> None:
    heard: list[float] = []
    log = ChangeLog()
    log.since(FROM_NOW, NAMES, 0.0)

    def remember(_name: str, _key: bytes, at: float) -> bool:
        heard.append(at)
        return at > 0

    events = TierEvents(log, STORAGE, remember)
    events.seen("a", [key("1")], 5.0)
    events.look()
    events.missed("a", [key("1")])
    assert heard == [5.0, -math.inf]


def test_a_namespace_that_is_cleared_is_taken_back() -> None:
    bench = Bench()
    bench.see("1")
    bench.events.seen("b", [key("2")], 0.0)
    bench.events.forget("a")
    assert bench.news() == [(True, key("1")), (False, key("1"))]


def test_all_are_looked_for_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKED_AT", 2)
    bench = Bench()
    bench.see("1", "2", "3", "4", "5")
    bench.news()
    bench.there.clear()
    removed = []
    for _ in range(3):
        bench.events.look()
        removed.append(len(b"".join(keys for _, keys in bench.news())) // 16)
    assert removed == [2, 2, 1]


def test_what_there_is_no_room_to_remember_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PAGES", 2)
    bench = Bench()
    bench.see("1", "2", "3")
    assert bench.news() == [(True, key("1") + key("2") + key("3")), (False, key("1"))]


def test_nothing_is_remembered_while_nobody_asks() -> None:
    bench = Bench()
    bench.see("1")
    bench.log.tick(ASKED_SECONDS)
    bench.events.look()
    bench.see("2")
    place = bench.log.since(FROM_NOW, NAMES, 100.0)[0]
    bench.see("1")
    assert bench.log.since(place, NAMES, 100.0)[2] == [ChangeRun(0, True, key("1"))]


@given(st.lists(st.tuples(st.sampled_from(["see", "leave", "look"]), st.sampled_from("123456")), max_size=60))
def test_after_a_look_others_know_what_is_there(history: list[tuple[str, str]]) -> None:
    bench = Bench()
    known: set[bytes] = set()
    for what, name in history:
        if what == "see":
            bench.see(name)
        elif what == "leave":
            bench.there.discard(key(name))
        else:
            bench.events.look()
        for stored, keys in bench.news():
            for one in (keys[at : at + 16] for at in range(0, len(keys), 16)):
                if stored:
                    known.add(one)
                else:
                    known.remove(one)
    bench.events.look()
    known -= {
        one
        for stored, keys in bench.news()
        if not stored
        for one in (keys[i : i + 16] for i in range(0, len(keys), 16))
    }
    assert known == bench.there
