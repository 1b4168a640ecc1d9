"""The index of prefixes against a model that forgets nothing, and its bounds."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ems.router.choosing.prefix_index import MOST_FORGOTTEN, MOST_PIECES, PIECE_BYTES, PrefixIndex, prefix_hashes
from ems.router.choosing.sessions import Sessions
from tests.kit.examples import examples

CAPACITY = 6
PROMPTS = st.lists(st.integers(0, 2), max_size=5)


def named(pieces: list[int]) -> list[int]:
    return prefix_hashes(b"".join(bytes([piece]) * PIECE_BYTES for piece in pieces), b"salt")


class Index(RuleBasedStateMachine):
    """Instances come, learn and go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(CAPACITY)
        self.have: dict[int, set[int]] = {}

    @rule()
    def add(self) -> None:
        bit = self.index.add()

        assert bit.bit_count() == 1
        assert bit not in self.have
        self.have[bit] = set()

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.have:
            bit = data.draw(st.sampled_from(sorted(self.have)))
            self.index.forget(bit)
            del self.have[bit]

    @rule(data=st.data(), prompt=PROMPTS)
    def learn(self, data: st.DataObject, prompt: list[int]) -> None:
        if self.have:
            bit = data.draw(st.sampled_from(sorted(self.have)))
            self.index.learn(named(prompt), bit)
            self.have[bit].update(named(prompt))

    @rule(prompt=PROMPTS)
    def match(self, prompt: list[int]) -> None:
        seen = 0
        for count, mask in self.index.matched(named(prompt)):
            assert mask
            assert not seen & mask, "an instance has one count"
            seen |= mask
            for bit, known in self.have.items():
                if mask & bit:
                    assert set(named(prompt)[:count]) <= known, "nobody has what he was not sent"
        assert not seen & ~sum(self.have)

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= 2 * CAPACITY


TestIndex = Index.TestCase
TestIndex.settings = examples(200, stateful_step_count=40)


def test_what_was_just_learned_is_found_whole() -> None:
    index = PrefixIndex()
    one, two = index.add(), index.add()
    index.learn(named([1, 2, 3]), one)
    index.learn(named([1, 2]), two)

    assert [(2, two), (3, one)] == index.matched(named([1, 2, 3, 4]))
    assert index.matched(named([2])) == []


def test_what_is_used_stays_when_others_come() -> None:
    index = PrefixIndex(4)
    bit = index.add()
    for other in range(100, 200):
        index.learn(named([1]), bit)
        index.learn([other], bit)

    assert [(1, bit)] == index.matched(named([1]))


def test_numbers_stay_small_though_an_instance_goes_again_and_again() -> None:
    index = PrefixIndex()
    stays = index.add()
    index.learn([1, 2], stays)
    for number in range(10 * MOST_FORGOTTEN):
        bit = index.add()
        assert bit.bit_length() <= MOST_FORGOTTEN + 2
        assert all(not mask & bit for _, mask in index.matched([1, 2])), "it has nothing yet"
        index.learn([1, 100 + number % 7], bit)
        index.forget(bit)

    assert index.matched([1, 2]) == [(2, stays)]


def test_names_depend_on_all_before_and_on_the_salt_and_are_bounded() -> None:
    text = b"x" * PIECE_BYTES * 3

    assert prefix_hashes(text, b"a")[0] != prefix_hashes(text, b"b")[0]
    assert prefix_hashes(text, b"a")[1:] != prefix_hashes(b"y" + text[1:], b"a")[1:]
    assert prefix_hashes(text[:-1], b"a") == prefix_hashes(text, b"a")[:2]
    assert len(prefix_hashes(b"x" * PIECE_BYTES * (MOST_PIECES + 5), b"")) == MOST_PIECES


def test_sessions_are_bounded_and_the_oldest_goes_first() -> None:
    sessions = Sessions(10.0, 2)
    sessions.keep(b"a", 1, 0.0)
    sessions.keep(b"b", 2, 1.0)
    sessions.keep(b"a", 1, 2.0)
    sessions.keep(b"c", 4, 3.0)

    assert len(sessions) == 2
    assert [sessions.find(name, 4.0) for name in (b"a", b"b", b"c")] == [1, 0, 4]
