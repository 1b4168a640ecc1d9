"""Whose question a tier is asked next: parties take turns, and none waits for all that another asks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.pool.movement.questions import MOST_PARTY_KEYS, Questions

PARTIES = st.sampled_from(["user 1", "user 2", "tenant a"])
AT_ONCE = 2


class QuestionsMachine(RuleBasedStateMachine):
    """Questions of some parties, beside a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: Questions[int] = Questions(AT_ONCE)
        self.waiting: list[tuple[int, str, int]] = []
        self.under_way: list[tuple[int, str, int]] = []
        self.served_since: dict[int, Counter[str]] = {}
        """Of each question that waits, how often each party had a turn since it came."""
        self.number = 0

    @rule(parties=st.lists(PARTIES, min_size=1, max_size=6), keys=st.integers(1, MOST_PARTY_KEYS // 3))
    def ask(self, parties: list[str], keys: int) -> None:
        for party in parties:
            self._ask(party, keys)

    def _ask(self, party: str, keys: int) -> None:
        kept = sum(count for _, whose, count in self.waiting + self.under_way if whose == party)
        assert self.questions.has_room(party) == (kept < MOST_PARTY_KEYS)
        if self.questions.has_room(party):
            self.number += 1
            self.questions.add(self.number, party, keys)
            self.waiting.append((self.number, party, keys))
            self.served_since[self.number] = Counter()

    @rule()
    def next(self) -> None:
        found = self.questions.next()
        assert (found is None) == (len(self.under_way) == AT_ONCE or not self.waiting)
        if found is None:
            return
        taken = next(one for one in self.waiting if one[0] == found)
        party = taken[1]
        assert found == next(number for number, whose, _ in self.waiting if whose == party), "in their order"
        before = Counter(whose for number, whose, _ in self.waiting if number < found)[party]
        assert before == 0
        for number, whose, _ in self.waiting:
            if whose != party:
                self.served_since[number][party] += 1
                mine = self.served_since[number][whose]
                assert self.served_since[number][party] <= mine + 1, "between two turns of one the other has one"
            elif number != found:
                self.served_since[number][whose] += 1
        self.waiting.remove(taken)
        self.under_way.append(taken)

    @rule(count=st.integers(1, 8))
    def end_and_go_on(self, count: int) -> None:
        for _ in range(count):
            self.end(0)
            self.next()

    @rule(which=st.integers(0, AT_ONCE - 1))
    def end(self, which: int) -> None:
        if which < len(self.under_way):
            self.questions.ended(self.under_way.pop(which)[0])

    @rule()
    def drop(self) -> None:
        self.questions.drop()
        self.waiting.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.questions) == len(self.waiting) + len(self.under_way)


TestQuestions = QuestionsMachine.TestCase


@given(st.integers(1, 50))
def test_who_asks_once_waits_for_one_question_of_another(many: int) -> None:
    questions: Questions[str] = Questions(1)
    for number in range(many):
        questions.add(f"many {number}", "user 1", 1)
    assert questions.next() == "many 0"
    questions.add("one", "user 2", 1)
    order: list[str] = []
    for _ in range(2):
        questions.ended(order[-1] if order else "many 0")
        if (found := questions.next()) is not None:
            order.append(found)
    assert "one" in order[:2]


@pytest.mark.parametrize("keys", [MOST_PARTY_KEYS, MOST_PARTY_KEYS * 4])
def test_a_large_question_is_asked_and_no_more_beside_it(keys: int) -> None:
    questions: Questions[str] = Questions(2)
    questions.add("large", "user 1", keys)
    assert not questions.has_room("user 1")
    assert questions.has_room("user 2")
    assert questions.next() == "large"
    questions.ended("large")
    assert questions.has_room("user 1")
