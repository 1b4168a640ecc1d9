"""Random histories of requests, failures, removals and events: what always holds of loads, index and choices."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.http.address import Address
from ems.router.choosing.chooser import Chooser
from ems.router.choosing.prefix_index import Place, PrefixIndex
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Hold, Role

CAPACITY = 8
ROLES = st.sampled_from(list(Role))
PORTS = st.integers(1, 3)
PROMPTS = st.builds(
    lambda family, pieces, session: Prompt(
        pieces * 64, pieces * 256, [family * 100 + at for at in range(pieces)], session
    ),
    st.integers(0, 2),
    st.integers(0, 6),
    st.sampled_from([b"", b"a", b"b"]),
)


class Side:
    """A fleet with its chooser; two of them that hear the same must choose the same."""

    def __init__(self) -> None:
        self.index = PrefixIndex(CAPACITY)
        self.chooser = Chooser(session_lifetime=5.0, index=self.index)
        self.fleet = Fleet(self.chooser.forget)
        self.holds: list[Hold] = []


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sides = (Side(), Side())
        self.now = 0.0

    @rule(role=ROLES, port=PORTS)
    def add(self, role: Role, port: int) -> None:
        for side in self.sides:
            side.fleet.add(role, Address("h", port), self.now, trusted=True)

    @rule(role=ROLES, port=PORTS)
    def remove(self, role: Role, port: int) -> None:
        for side in self.sides:
            side.fleet.remove(role, Address("h", port))

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(role=ROLES, prompt=PROMPTS, prefilled=st.booleans())
    def send(self, role: Role, prompt: Prompt, prefilled: bool) -> None:
        chosen: list[object] = []
        for side in self.sides:
            usable = side.fleet.usable(role)
            score = side.chooser.choose(role, usable, prompt, self.now, prefilled=prefilled)
            assert (score is None) == (not usable)
            if score is None:
                chosen.append(None)
                continue
            instance = score.instance
            assert instance in usable
            assert not instance.draining
            assert instance.breaker.usable
            assert 0 <= score.uncached <= prompt.tokens
            side.holds.append(side.fleet.hold(instance, prompt.tokens, score.uncached))
            side.chooser.sent(instance, prompt, self.now)
            chosen.append((instance.address, score.uncached, score.cost, score.sticky))
        assert chosen[0] == chosen[1]

    @rule(number=st.integers(0, 100), first_token=st.booleans(), fails=st.booleans())
    def end(self, number: int, first_token: bool, fails: bool) -> None:
        for side in self.sides:
            if side.holds:
                hold = side.holds.pop(number % len(side.holds))
                if first_token:
                    hold.computed()
                if fails:
                    side.fleet.failed(hold.instance, self.now)
                hold.release()

    @rule(role=ROLES, prompt=PROMPTS, place=st.sampled_from(list(Place)), stored=st.booleans())
    def event(self, role: Role, prompt: Prompt, place: Place, stored: bool) -> None:
        for side in self.sides:
            side.chooser.take_event(side.fleet.listed(role)[:1], 64, place, prompt.hashes, stored=stored)

    @invariant()
    def the_index_is_bounded(self) -> None:
        for side in self.sides:
            assert len(side.index) <= 2 * CAPACITY

    @invariant()
    def loads_are_those_of_what_is_held(self) -> None:
        for side in self.sides:
            for role in Role:
                for instance in side.fleet.listed(role):
                    mine = [hold for hold in side.holds if hold.instance is instance]
                    assert instance.running == len(mine)
                    assert instance.load == sum(hold.cost for hold in mine)
                    assert instance.queued >= 0

    def teardown(self) -> None:
        for side in self.sides:
            instances = [hold.instance for hold in side.holds]
            random.Random(0).shuffle(side.holds)
            for hold in side.holds:
                hold.release()
            instances += [one for role in Role for one in side.fleet.listed(role)]
            assert all(one.load == one.queued == one.running == 0 for one in instances)
            assert not side.fleet.leaving()


TestHistories = Histories.TestCase
