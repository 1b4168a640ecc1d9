from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ems.router.admission.queue import BOOSTS_IN_A_ROW, MOST_USERS, Place, Queue, State


def place(user: str = "u", tokens: int = 10, *, deadline: float = 1e9, priority: int = 0, session: str = "") -> Place:
    return Place(user=user, tokens=tokens, deadline=deadline, priority=priority, session=session)


def offered(queue: Queue, *places: Place, now: float = 0.0) -> None:
    for one in places:
        assert queue.offer(one, now) == []


def order(queue: Queue, running: Place, now: float = 0.0) -> list[Place]:
    """Let one request after the other run alone; each uses what was expected."""
    ran = []
    while granted := queue.leave(running, now, running.tokens):
        assert len(granted) == 1
        running = granted[0]
        ran.append(running)
    return ran


def test_runs_at_once_while_there_are_places_and_waits_then() -> None:
    queue = Queue(capacity=2, size=8)
    places = [place() for _ in range(3)]
    offered(queue, *places)

    assert [one.state for one in places] == [State.RUNNING, State.RUNNING, State.WAITING]
    assert queue.leave(places[0], 0.0, 5) == [places[2]]
    assert (queue.running, queue.waiting) == (2, 0)


def test_one_user_is_served_in_order() -> None:
    queue = Queue(capacity=1, size=8)
    first, *rest = (place() for _ in range(5))
    offered(queue, first, *rest)

    assert order(queue, first) == rest


def test_a_light_user_goes_before_a_heavy_one() -> None:
    queue = Queue(capacity=1, size=100)
    first, *heavy = (place("heavy", 100) for _ in range(5))
    light = [place("light", 10) for _ in range(3)]
    offered(queue, first, *heavy, *light)

    assert order(queue, first)[:3] == light


def test_two_equal_users_take_turns() -> None:
    queue = Queue(capacity=1, size=100)
    first = place("x", 1)
    a = [place("a") for _ in range(3)]
    b = [place("b") for _ in range(3)]
    offered(queue, first, *a, *b)

    assert [one.user for one in order(queue, first)] == ["a", "b", "a", "b", "a", "b"]


def test_use_fades() -> None:
    queue = Queue(capacity=1, size=100, half_life=10.0)
    early = place("early", 1000)
    offered(queue, early)
    queue.leave(early, 0.0, 1000)

    assert round(queue.use_of("early", 10.0)) == 500
    late = place("late", 100)
    offered(queue, late, now=1e5)
    queue.leave(late, 1e5, 100)
    assert queue.use_of("early", 1e5) < queue.use_of("late", 1e5)


def test_a_failed_request_uses_nothing_and_an_estimate_is_corrected() -> None:
    queue = Queue(capacity=2, size=1)
    failed, done = place("failed", 100), place("done", 100)
    offered(queue, failed, done)
    queue.leave(failed, 0.0)
    queue.leave(done, 0.0, 30)

    assert queue.use_of("failed", 0.0) == 0
    assert round(queue.use_of("done", 0.0)) == 30


def test_priority_goes_first() -> None:
    queue = Queue(capacity=1, size=8)
    first, low, high = place(), place(priority=1), place(priority=-1)
    normal = place()
    offered(queue, first, low, normal, high)

    assert order(queue, first) == [high, normal, low]


def test_a_session_that_just_answered_goes_first_but_not_for_ever() -> None:
    queue = Queue(capacity=1, size=100, boost_seconds=30.0)
    begun = place("talker", session="s")
    offered(queue, begun)
    queue.leave(begun, 0.0, 1)
    first = place()
    others = [place("other") for _ in range(2)]
    turns = [place("talker", session="s") for _ in range(BOOSTS_IN_A_ROW + 1)]
    offered(queue, first, *others, *turns)

    ran = order(queue, first)
    assert ran[:BOOSTS_IN_A_ROW] == turns[:BOOSTS_IN_A_ROW]
    assert ran[BOOSTS_IN_A_ROW] is others[0]
    late = place("talker", session="s")
    offered(queue, place("other"), late, now=1000.0)
    assert late.boosted < 0


def test_a_full_queue_refuses_and_the_user_with_most_gives_way() -> None:
    queue = Queue(capacity=1, size=3)
    greedy = [place("greedy") for _ in range(4)]
    offered(queue, *greedy)

    more = place("greedy")
    offered(queue, more)
    assert more.state is State.GONE
    other = place("other")
    assert queue.offer(other, 0.0) == [greedy[3]]
    assert other.state is State.WAITING
    assert queue.waiting == 3


def test_a_full_queue_looks_at_who_waits_and_not_at_everybody_it_knows() -> None:
    queue = Queue(capacity=1, size=4)
    for user in range(MOST_USERS):
        one = place(f"user {user}")
        offered(queue, one)
        queue.leave(one, 0.0, 1)
    offered(queue, *(place() for _ in range(5)))

    began = time.process_time()
    offered(queue, *(place() for _ in range(300)))
    assert time.process_time() - began < 0.5


def test_who_waited_too_long_or_left_is_nowhere() -> None:
    queue = Queue(capacity=1, size=8)
    first, late, left, last = place(), place(deadline=5.0), place(), place()
    offered(queue, first, late, left, last)

    assert queue.next_deadline() == 5.0
    assert queue.expire(4.9) == []
    assert queue.expire(5.0) == [late]
    assert queue.leave(left, 5.0) == []
    assert order(queue, first, 6.0) == [last]
    assert (queue.running, queue.waiting) == (0, 0)


def test_more_places_let_more_run() -> None:
    queue = Queue(capacity=1, size=8)
    places = [place() for _ in range(3)]
    offered(queue, *places)
    assert queue.running == 1

    queue.capacity = 2
    assert queue.grant(0.0) == [places[1]]
    queue.capacity = 0
    assert queue.grant(0.0) == [places[2]]


class Histories(RuleBasedStateMachine):
    """Random histories: places return to zero, nobody runs twice, nobody is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(capacity=2, size=4, half_life=10.0, boost_seconds=5.0)
        self.now = 0.0
        self.places: list[Place] = []

    @rule(
        user=st.sampled_from("abc"),
        tokens=st.integers(0, 1000),
        priority=st.integers(-1, 1),
        session=st.sampled_from(["", "s", "t"]),
    )
    def offer(self, user: str, tokens: int, priority: int, session: str) -> None:
        new = place(user, tokens, deadline=self.now + 20.0, priority=priority, session=session)
        victims = self.queue.offer(new, self.now)
        self.places.append(new)
        assert all(one.state is State.GONE and one is not new for one in victims)

    @precondition(lambda self: self.places)
    @rule(number=st.integers(0, 1000), used=st.none() | st.integers(0, 2000))
    def leave(self, number: int, used: int | None) -> None:
        one = self.places[number % len(self.places)]
        granted = self.queue.leave(one, self.now, used)
        assert one.state is State.GONE
        assert all(other.state is State.RUNNING for other in granted)

    @rule(seconds=st.floats(0, 2000))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for one in self.queue.expire(self.now):
            assert one.deadline <= self.now

    @rule(capacity=st.integers(1, 4))
    def change(self, capacity: int) -> None:
        self.queue.capacity = capacity
        self.queue.grant(self.now)

    @invariant()
    def counts(self) -> None:
        states = [one.state for one in self.places]
        assert self.queue.running == states.count(State.RUNNING)
        assert self.queue.waiting == states.count(State.WAITING) <= 4
        free = self.queue.running < self.queue.capacity
        assert not (free and self.queue.waiting)

    def teardown(self) -> None:
        for one in self.places:
            self.queue.leave(one, self.now, 1)
        for one in self.places:
            self.queue.leave(one, self.now, 1)
        assert (self.queue.running, self.queue.waiting) == (0, 0)
        assert self.queue.next_deadline() is None


TestHistories = Histories.TestCase


@given(st.lists(st.sampled_from("abcd"), min_size=8, max_size=60))
def test_memory_does_not_grow_with_who_left(users: list[str]) -> None:
    queue = Queue(capacity=1, size=1000)
    offered(queue, place("first"), place("second"))
    for user in users * 40:
        one = place(user)
        queue.offer(one, 0.0)
        queue.leave(one, 0.0)

    assert queue.waiting == 1
    assert len(queue._heads) < 200
    assert sum(map(len, queue._lanes.values())) < 200
