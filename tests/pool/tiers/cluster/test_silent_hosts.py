"""Which hosts do not answer, against a model that knows when each was heard and how much is on its way."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ems.pool.tiers.cluster.silent_hosts import ANSWER_SECONDS, LEAST_RATE, SILENT_SECONDS, SilentHosts

HOSTS = ("a", "b", "c")
hosts = st.sampled_from(HOSTS)


class AnsweringHosts(RuleBasedStateMachine):
    """Transfers begin, end and hang; whoever waits for one doubts its host, and asks."""

    @initialize(silent=st.sets(hosts))
    def start(self, silent: set[str]) -> None:
        self.now = 1000.0
        self.brain = SilentHosts(silent, self.now)
        self.found = dict.fromkeys(silent, self.now)
        self.begun: list[tuple[str, int, float]] = []
        self.heard: dict[str, float] = {}

    @rule(seconds=st.floats(0, 30))
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
            self.brain.heard(host, self.now)
            self.heard[host] = self.now

    @rule(host=hosts, answers=st.booleans())
    def is_asked(self, host: str, answers: bool) -> None:
        if answers:
            self.brain.heard(host, self.now)
            self.heard[host] = self.now
        else:
            self.brain.found_silent([host], self.now)
            self.found[host] = self.now

    @invariant()
    def only_who_was_found_silent_is_left_alone_and_for_a_while(self) -> None:
        silent = {host for host, found in self.found.items() if self.now < found + SILENT_SECONDS}
        assert set(self.brain.silent(self.now)) == silent
        assert {host for host in HOSTS if self.brain.is_silent(host, self.now)} == silent

    @invariant()
    def who_was_heard_or_has_much_to_send_is_not_doubted(self) -> None:
        for host, _, since in self.begun:
            coming = sum(size for other, size, _ in self.begun if other == host)
            quiet = self.now - max(since, self.heard.get(host, since))
            doubtful = quiet >= ANSWER_SECONDS + coming / LEAST_RATE and not self.brain.is_silent(host, self.now)
            assert self.brain.is_doubtful(host, since, self.now) == doubtful


TestAnsweringHosts = AnsweringHosts.TestCase


def test_the_bytes_of_all_transfers_together_take_their_time() -> None:
    brain = SilentHosts((), 0.0)
    for _ in range(4):
        brain.expect("a", 4 * LEAST_RATE)
    assert not brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 15.9)
    assert brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 16)
    brain.expect("a", -4 * LEAST_RATE)
    assert brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 12)
    brain.heard("a", 12.0)
    assert not brain.is_doubtful("a", 0.0, ANSWER_SECONDS + 12)
    assert not brain.is_doubtful("b", 0.0, ANSWER_SECONDS / 2)
