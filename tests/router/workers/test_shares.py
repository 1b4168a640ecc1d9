"""Whatever is said or lost between workers: in the end each sees the sum, and nothing of what has ended."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ems.http.address import Address
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Hold, Load, Role
from ems.router.workers import messages
from ems.router.workers.messages import State
from ems.router.workers.shares import MOST_LEARNED, Shares
from tests.router.soundness import unsound

WORKERS = st.integers(0, 2)
KEYS = [(role, Address("h", port)) for role in Role for port in (1, 2)]
PROMPT = Prompt(100, 400, [1, 2, 3], b"talk")


class Workers(RuleBasedStateMachine):
    """Three workers and what is on its way to each: packets in order, of which some are lost, and ends of others."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = dict.fromkeys(KEYS, True)
        self.coming: list[deque[tuple[int, bytes]]] = [deque() for _ in range(3)]
        self.holds: list[list[Hold]] = [[] for _ in range(3)]
        self.woken = [False] * 3
        self.workers = [self.new(number) for number in range(3)]

    def new(self, number: int) -> Shares:
        def wake() -> None:
            self.woken[number] = True

        shares = Shares(60.0, wake)
        for (role, address), listed in self.listed.items():
            if listed:
                shares.fleet.add(role, address, 0.0, trusted=True)
        return shares

    def say(self, number: int, *, full: bool) -> None:
        state = self.workers[number].state(full=full)
        while state is not None:
            for other in {0, 1, 2} - {number}:
                self.coming[other].append((number, messages.encode(state)))
            state = self.workers[number].state()

    def hear(self, number: int) -> None:
        sender, packet = self.coming[number].popleft()
        if not packet:
            self.workers[number].forget(sender)
            return
        state = messages.decode(packet)
        assert isinstance(state, State)
        if self.workers[number].take(sender, state, 0.0):
            self.say(number, full=True)

    @rule(number=WORKERS, key=st.sampled_from(KEYS), cost=st.integers(1, 99), queued=st.integers(0, 9))
    def dispatch(self, number: int, key: tuple[Role, Address], cost: int, queued: int) -> None:
        shares = self.workers[number]
        for instance in shares.fleet.listed(key[0]):
            if instance.address == key[1]:
                self.holds[number].append(shares.fleet.hold(instance, cost, queued))
                shares.chooser.sent(instance, PROMPT, 0.0)
                assert self.woken[number]
                assert instance in shares.fleet.changed

    @rule(number=WORKERS, ends=st.booleans(), draw=st.randoms(use_true_random=False))
    def move_on(self, number: int, draw: Any, *, ends: bool) -> None:
        if holds := self.holds[number]:
            place = draw.randrange(len(holds))
            if ends:
                holds.pop(place).release()
            else:
                holds[place].computed()

    @rule(number=WORKERS, full=st.booleans())
    def tell(self, number: int, *, full: bool) -> None:
        self.say(number, full=full)

    @rule(number=WORKERS)
    def listen(self, number: int) -> None:
        if self.coming[number]:
            self.hear(number)

    @rule(number=WORKERS)
    def lose(self, number: int) -> None:
        if self.coming[number] and self.coming[number][0][1]:
            self.coming[number].popleft()

    @rule(key=st.sampled_from(KEYS))
    def list_or_remove(self, key: tuple[Role, Address]) -> None:
        self.listed[key] = not self.listed[key]
        for one in self.workers:
            if self.listed[key]:
                one.fleet.add(*key, 0.0, trusted=True)
            else:
                one.fleet.remove(*key)

    @rule(number=WORKERS)
    def die(self, number: int) -> None:
        """It is killed, and another one takes its number; to that one it does not matter who else is gone."""
        self.holds[number].clear()
        self.coming[number].clear()
        self.workers[number] = self.new(number)
        for other in {0, 1, 2} - {number}:
            self.coming[other].append((number, b""))

    @rule()
    def settle(self) -> None:
        """All is told that there is, and nothing more is lost."""
        for number in range(3):
            self.say(number, full=True)
        while any(self.coming):
            for number in range(3):
                while self.coming[number]:
                    self.hear(number)
        for number, shares in enumerate(self.workers):
            for key in KEYS:
                instance = shares.fleet.find(*key)
                if instance is None:
                    continue
                there = [other.fleet.find(*key) for other in self.workers]
                all_of_it = [other.own for other in there if other is not None]
                assert tuple(map(sum, zip(*all_of_it, strict=True))) == (
                    instance.load, instance.queued, instance.running
                ), (number, key)  # fmt: skip

    @precondition(lambda self: not any(self.coming))
    @rule(number=WORKERS)
    def changes_are_enough(self, number: int) -> None:
        """Where nothing was lost, what changed makes the same sum as everything."""
        self.settle()
        for holds in self.holds:
            if holds:
                holds[0].computed()
        key = KEYS[0]
        self.dispatch(number, key, 7, 3)
        for one in range(3):
            self.say(one, full=False)
        while any(self.coming):
            for one in range(3):
                while self.coming[one]:
                    self.hear(one)
        found = [shares.fleet.find(*key) for shares in self.workers]
        seen = {(one.load, one.queued) for one in found if one is not None}
        assert len(seen) <= 1

    @invariant()
    def sound(self) -> None:
        for one in self.workers:
            assert unsound(one.fleet) == []

    def teardown(self) -> None:
        for holds in self.holds:
            while holds:
                holds.pop().release()
        self.settle()
        for one in self.workers:
            assert not any(any(had.values()) for had in one.others.values())
            assert one.fleet.leaving() == []
            for role in Role:
                assert all((each.load, each.queued, each.running) == (0, 0, 0) for each in one.fleet.listed(role))


TestWorkers = Workers.TestCase


def two() -> tuple[Shares, Shares]:
    pair = Shares(60.0), Shares(60.0)
    for one in pair:
        for port in (1, 2):
            one.fleet.add(Role.DECODE, Address("h", port), 0.0, trusted=True)
    return pair


def carried(state: State | None) -> State:
    assert state is not None
    message = messages.decode(messages.encode(state))
    assert isinstance(message, State)
    return message


def test_what_one_sends_somewhere_the_other_chooses_by() -> None:
    here, there = two()
    long = Prompt(1024, 4096, list(range(16)), b"talk")
    first = here.fleet.listed(Role.DECODE)[1]
    here.fleet.hold(first, 10)
    here.chooser.sent(first, long, 0.0)

    there.take(0, carried(here.state()), 0.0)
    one, other = there.chooser.scores(Role.DECODE, there.fleet.usable(Role.DECODE), long, 0.0)

    assert (one.uncached, one.sticky) == (1024, False)
    assert (other.uncached, other.sticky, other.instance.load, other.instance.own) == (0, True, 10, Load())
    assert here.state() is None


def test_a_text_with_known_tokens_is_known_to_the_other_by_both() -> None:
    here, there = two()
    both = Prompt(128, 600, [1, 2], b"talk", 64, [7, 8])
    here.chooser.sent(here.fleet.listed(Role.DECODE)[1], both, 0.0)

    told = carried(here.state())
    there.take(0, told, 0.0)
    for hashes in ([1, 2], [7, 8]):
        for shares in (here, there):
            asked = both._replace(hashes=hashes, text_hashes=())
            scores = shares.chooser.scores(Role.DECODE, shares.fleet.usable(Role.DECODE), asked, 0.0)
            assert [score.uncached for score in scores] == [128, 0]
    assert [one.session for one in told.learned] == [b"talk", b""]
    here.chooser.sent(here.fleet.listed(Role.DECODE)[1], both._replace(session=b""), 0.0)
    assert here.state() is None


def test_among_equals_it_counts_where_the_others_sent_something_last() -> None:
    here, there = two()
    first, other = there.fleet.listed(Role.DECODE)
    short = PROMPT._replace(hashes=[], session=b"")
    for taken, next_one in ((0, other), (1, first)):
        hold = here.fleet.hold(here.fleet.listed(Role.DECODE)[taken], 1)
        there.take(0, carried(here.state()), 0.0)
        hold.release()
        there.take(0, carried(here.state()), 0.0)

        score = there.chooser.choose(Role.DECODE, [first, other], short, 0.0)
        assert score is not None
        assert score.instance is next_one


def test_an_end_that_was_missed_is_made_up_for_by_what_is_told_in_full() -> None:
    here, there = two()
    hold = here.fleet.hold(here.fleet.listed(Role.DECODE)[0], 10)
    there.take(0, carried(here.state()), 0.0)
    hold.release()
    assert carried(here.state()).loads == [(Role.DECODE, Address("h", 1), Load())]

    there.take(0, carried(here.state(full=True)), 0.0)

    assert there.fleet.listed(Role.DECODE)[0].load == 0


def test_an_end_is_told_as_soon_as_a_beginning() -> None:
    here, there = two()
    hold = here.fleet.hold(here.fleet.listed(Role.DECODE)[0], 10)
    there.take(0, carried(here.state()), 0.0)
    hold.release()
    there.take(0, carried(here.state()), 0.0)

    assert there.fleet.listed(Role.DECODE)[0].running == 0


def test_an_instance_that_comes_later_has_the_load_of_others_at_once_and_leaves_without_them() -> None:
    here, there = two()
    one = Address("h", 1)
    hold = here.fleet.hold(here.fleet.listed(Role.DECODE)[0], 10)
    there.fleet.remove(Role.DECODE, one)
    assert there.take(0, carried(here.state()), 0.0)

    there.fleet.add(Role.DECODE, one, 0.0, trusted=True)
    instance = there.fleet.find(Role.DECODE, one)
    assert instance is not None
    assert (instance.load, instance.running, instance.own) == (10, 1, Load())

    there.fleet.hold(instance, 5).release()
    own = there.fleet.hold(instance, 5)
    there.fleet.remove(Role.DECODE, one)
    assert there.fleet.leaving() == [instance]
    own.release()
    assert there.fleet.leaving() == []

    there.fleet.add(Role.DECODE, one, 0.0, trusted=True)
    there.fleet.remove(Role.DECODE, one)
    assert there.fleet.leaving() == [], "it has nothing of its own to finish"
    hold.release()


def test_what_was_told_of_a_prompt_is_not_told_again() -> None:
    here, there = two()
    first, other = here.fleet.listed(Role.DECODE)
    for length in (4, 4, 9):
        here.chooser.sent(first, PROMPT._replace(hashes=list(range(length)), session=b""), 0.0)
    here.chooser.sent(other, PROMPT._replace(hashes=[0, 1]), 0.0)
    state = carried(here.state())

    assert [len(one.hashes) // 4 for one in state.learned] == [4, 5, 2]
    there.take(0, state, 0.0)
    prompt = PROMPT._replace(tokens=1000, text_bytes=10 * 256, hashes=list(range(10)))
    scores = there.chooser.scores(Role.DECODE, there.fleet.usable(Role.DECODE), prompt, 0.0)
    assert [one.uncached for one in scores] == [100, 800]


def test_a_message_of_many_requests_is_bounded() -> None:
    here, _ = two()
    for number in range(3 * MOST_LEARNED):
        longest = PROMPT._replace(hashes=range(number << 10, (number + 1) << 10), session=b"s" * 256)
        here.chooser.sent(here.fleet.listed(Role.DECODE)[0], longest, 0.0)

    packets = [messages.encode(state) for state in iter(here.state, None)]

    assert len(packets) == 3
    assert max(map(len, packets)) < messages.LARGEST


def test_a_prompt_that_is_computed_is_told_though_no_request_begins_or_ends() -> None:
    here, there = two()
    hold = here.fleet.hold(here.fleet.listed(Role.DECODE)[0], 10, 8)
    there.take(0, carried(here.state()), 0.0)
    assert here.state() is None
    assert here.fleet.changed, "it is looked at again"

    hold.computed()
    there.take(0, carried(here.state()), 0.0)

    assert there.fleet.listed(Role.DECODE)[0].queued == 0
    assert not here.fleet.changed
