"""Which hosts do not answer, against a model that knows when each was heard and how much is on its way."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ems.pool.tiers.cluster.silent_hosts import ANSWER_SECONDS, LEAST_RATE, MOST_SECONDS, SILENT_SECONDS, SilentHosts

HOSTS = ("a", "b", "c")
hosts = st.sampled_from(HOSTS)


class AnsweringHosts(RuleBasedStateMachine):
    """Transfers begin, end and hang; whoever waits for one doubts its host, and asks."""

    @initialize(silent=st.dictionaries(hosts, st.floats(990, 1010)))
    def start(self, silent: dict[str, float]) -> None:
        self.now = 1000.0
        self.brain = SilentHosts(silent)
        self.until = dict(silent)
        self.begun: list[tuple[str, int, float]] = []
        self.asked: list[tuple[str, float]] = []
        self.heard: dict[str, float] = {}

    def hear(self, host: str) -> None:
        self.brain.heard(host, self.now)
        self.heard[host] = self.now
        self.until.pop(host, None)

    @rule(seconds=st.floats(0.001, 30))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(host=hosts, size=st.integers(1, 1 << 30))
    def begins(self, host: str, size: int) -> None:
        self.brain.expect(host, size)
        self.begun.append((host, size, self.now))

    @rule(at=st.integers(0, 20), arrives=st.booleans())
    def ends(self, at: int, arrives: bool) -> None:
        if not self.begun:
            return
        host, size, _ = self.begun.pop(at % len(self.begun))
        self.brain.expect(host, -size)
        if arrives:
            self.hear(host)

    @rule(host=hosts)
    def is_asked(self, host: str) -> None:
        self.asked.append((host, self.now))

    @rule(at=st.integers(0, 20), answers=st.booleans())
    def answers(self, at: int, answers: bool) -> None:
        """Others may have heard of the host since it was asked."""
        if not self.asked:
            return
        host, asked = self.asked.pop(at % len(self.asked))
        if answers:
            self.hear(host)
            return
        self.brain.found_silent([host], asked, self.now)
        if self.heard.get(host, -1.0) <= asked:
            self.until[host] = self.now + SILENT_SECONDS

    @invariant()
    def only_who_was_found_silent_is_left_alone_and_for_a_while(self) -> None:
        silent = {host: until for host, until in self.until.items() if self.now < until}
        assert self.brain.silent(self.now) == silent
        assert {host for host in HOSTS if self.brain.is_silent(host, self.now)} == set(silent)

    @invariant()
    def who_was_heard_or_has_much_to_send_is_not_doubted(self) -> None:
        for host, _, since in self.begun:
            coming = sum(size for other, size, _ in self.begun if other == host)
            quiet = self.now - max(since, self.heard.get(host, since))
            late = quiet >= min(ANSWER_SECONDS + coming / LEAST_RATE, MOST_SECONDS)
            assert self.brain.is_doubtful(host, since, self.now) == (late and not self.brain.is_silent(host, self.now))


TestAnsweringHosts = AnsweringHosts.TestCase


def test_the_bytes_of_all_transfers_together_take_their_time() -> None:
    brain = SilentHosts({})
    for _ in range(2):
        brain.expect("a", LEAST_RATE // 4)
    assert not brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 0.49)
    assert brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 0.5)
    brain.expect("a", -LEAST_RATE // 4)
    assert brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 0.25)
    brain.heard("a", 0.25)
    assert not brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 0.25)
    brain.expect("a", 1 << 40)
    assert brain.is_doubtful("a", 0.0, 0.25 + MOST_SECONDS), "who asks for a list does not wait for ever"
    assert not brain.is_doubtful("b", 0.0, ANSWER_SECONDS / 2)


def test_a_host_that_sent_something_while_it_was_asked_is_not_silent() -> None:
    """Over a busy link the few bytes come late, and what others read meanwhile says that it is there."""
    brain = SilentHosts({})
    brain.heard("a", 1.5)
    brain.found_silent(["a", "b"], 1.0, 2.0)
    assert brain.silent(2.0) == {"b": 12.0}
    brain.heard("b", 3.0)
    assert not brain.silent(3.0)


def test_an_agents_successor_leaves_a_host_alone_no_longer_than_the_agent_did() -> None:
    brain = SilentHosts({})
    brain.found_silent(["a"], 1.0, 2.0)
    for now in (5.0, 8.0, 11.0):
        brain = SilentHosts(brain.silent(now))
    assert not brain.silent(12.0)
