"""Which instance is chosen: by what waits there, what it has computed, what it holds, and which session was there."""

from __future__ import annotations

import pytest

from ems.http.address import Address
from ems.router.choosing.chooser import STICKY_TOKENS, WORK_WEIGHT, Chooser, Score
from ems.router.choosing.prefix_index import PIECE_BYTES, Place, block_hashes, prefix_hashes
from ems.router.choosing.prompt import Prompt
from ems.router.fleet import Fleet, Instance, Role


def prompt_of(text: str, session: bytes = b"") -> Prompt:
    raw = text.encode()
    return Prompt(len(raw) // 4, len(raw), prefix_hashes(raw, b""), session)


SHORT = prompt_of("short")
LONG = prompt_of("a" * PIECE_BYTES * 16)


class Three:
    """A fleet of three instances of one role."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.chooser = Chooser(session_lifetime=60.0)
        self.fleet = Fleet(self.chooser.forget)
        for port in (1, 2, 3):
            self.fleet.add(role, Address("h", port), 0.0, trusted=True)
        self.one, self.two, self.other = self.fleet.listed(role)

    def scores(self, prompt: Prompt) -> list[Score]:
        return self.chooser.scores(self.role, self.fleet.usable(self.role), prompt, 0.0)

    def choose(self, prompt: Prompt = SHORT, *, now: float = 0.0, prefilled: bool = False) -> Instance | None:
        score = self.chooser.choose(self.role, self.fleet.usable(self.role), prompt, now, prefilled=prefilled)
        return None if score is None else score.instance


def test_the_least_loaded_is_chosen() -> None:
    three = Three(Role.DECODE)
    three.fleet.hold(three.one, 10)
    three.fleet.hold(three.two, 5)
    three.fleet.hold(three.other, 7)

    assert three.two is three.choose()
    assert three.two is three.choose(prefilled=True)


def test_a_prefill_is_chosen_by_what_waits_there() -> None:
    three = Three(Role.PREFILL)
    three.fleet.hold(three.one, 10, 10)
    three.fleet.hold(three.two, 500, 5)
    hold = three.fleet.hold(three.other, 7, 7)

    assert three.two is three.choose()

    hold.computed()

    assert three.other is three.choose()


def test_equals_go_round() -> None:
    three = Three(Role.DECODE)
    chosen = []
    for _ in range(6):
        instance = three.choose()
        assert instance is not None
        three.fleet.hold(instance, 5).release()
        three.chooser.sent(instance, SHORT, 0.0)
        chosen.append(instance)

    assert [three.one, three.two, three.other] * 2 == chosen


@pytest.mark.parametrize("role", Role)
def test_a_prefix_draws_until_waiting_takes_longer_than_computing(role: Role) -> None:
    three = Three(role)
    three.fleet.hold(three.one, 1, 1)
    three.chooser.sent(three.one, LONG, 0.0)

    assert three.one is three.choose(LONG)
    assert three.one is not three.choose(prompt_of("b" * PIECE_BYTES * 16)), "another prompt has nothing there"

    three.fleet.hold(three.one, 0, int(WORK_WEIGHT * LONG.tokens))

    assert three.one is not three.choose(LONG)


def test_a_burst_of_one_prefix_does_not_scatter() -> None:
    three = Three(Role.PREFILL)
    chosen = set()
    for _ in range(5):  # none of them has ended
        usable = three.fleet.usable(Role.PREFILL)
        score = three.chooser.choose(Role.PREFILL, usable, LONG, 0.0)
        assert score is not None
        three.fleet.hold(score.instance, score.uncached, score.uncached // 2)
        three.chooser.sent(score.instance, LONG, 0.0)
        chosen.add(score.instance)

    assert len(chosen) == 1


def test_only_whole_pieces_from_the_beginning_count() -> None:
    three = Three(Role.PREFILL)
    three.chooser.sent(three.one, prompt_of("a" * PIECE_BYTES * 4 + "b" * PIECE_BYTES * 12), 0.0)
    three.chooser.sent(three.two, prompt_of("b" + "a" * PIECE_BYTES * 16), 0.0)
    uncached = [
        score.uncached for score in three.chooser.scores(Role.PREFILL, three.fleet.usable(Role.PREFILL), LONG, 0.0)
    ]

    assert [LONG.tokens * 12 // 16, LONG.tokens, LONG.tokens] == uncached


def test_who_was_put_aside_or_left_has_nothing_any_more() -> None:
    three = Three(Role.DECODE)
    three.chooser.sent(three.two, LONG, 0.0)
    while not three.fleet.failed(three.two, 0.0):
        pass
    assert three.fleet.due_probes(1000.0)
    three.two.breaker.probe_passed()
    hold = three.fleet.hold(three.other, 1)
    three.chooser.sent(three.other, LONG, 0.0)
    three.fleet.remove(Role.DECODE, three.other.address)
    hold.release()
    three.fleet.add(Role.DECODE, three.other.address, 0.0, trusted=True)

    scores = three.chooser.scores(Role.DECODE, three.fleet.usable(Role.DECODE), LONG, 0.0)

    assert [LONG.tokens] * 3 == [score.uncached for score in scores]


def test_a_session_stays_unless_that_costs_too_much_or_it_is_over() -> None:
    three = Three(Role.DECODE)
    turn = prompt_of("short", b"mine")
    three.chooser.sent(three.two, turn, 0.0)
    three.fleet.hold(three.two, 0, STICKY_TOKENS)

    assert three.two is three.choose(turn, now=59.0)
    assert three.two is not three.choose(prompt_of("short", b"other"), now=59.0)
    assert three.two is not three.choose(turn, now=60.0)

    three.chooser.sent(three.two, turn, 60.0)
    three.fleet.hold(three.two, 0, 1)

    assert three.two is not three.choose(turn, now=61.0)


def test_a_session_leaves_an_instance_that_is_doubted() -> None:
    three = Three(Role.DECODE)
    turn = prompt_of("short", b"mine")
    three.chooser.sent(three.two, turn, 0.0)
    three.fleet.suspect(three.two, 0.0)

    assert three.two is not three.choose(turn)


def test_doubt_weighs_more_than_load() -> None:
    three = Three(Role.DECODE)
    three.fleet.suspect(three.one, 0.0)
    three.fleet.suspect(three.two, 0.0)
    three.fleet.hold(three.other, 1000)

    assert three.other is three.choose()


TOKENS = list(range(64 * 16))
TOLD = Prompt(len(TOKENS), 5 * len(TOKENS), block_hashes(TOKENS, 64, ""), b"", 64)


def test_what_an_engine_tells_of_draws_its_prompts_until_it_is_gone() -> None:
    three = Three(Role.DECODE)
    assert three.chooser.take_event([three.two], 16, Place.ENGINE, TOLD.hashes, stored=True)
    assert [score.uncached for score in three.scores(TOLD)] == [len(TOKENS), 0, len(TOKENS)]

    three.chooser.take_event([three.two], 16, Place.ENGINE, TOLD.hashes[8:], stored=False)
    assert [score.uncached for score in three.scores(TOLD)] == [len(TOKENS), len(TOKENS) // 2, len(TOKENS)]

    three.chooser.forget(three.two)
    assert [score.uncached for score in three.scores(TOLD)] == [len(TOKENS)] * 3


def test_what_the_pool_has_is_not_computed_and_costs_more_than_what_the_engine_has() -> None:
    three = Three(Role.DECODE)
    three.chooser.take_event([three.one], 16, Place.ENGINE, [], stored=True)
    three.chooser.take_event([three.two], 16, Place.HOST, TOLD.hashes, stored=True)
    three.chooser.take_event([three.two], 16, Place.ENGINE, TOLD.hashes, stored=True)
    one, two, silent = three.scores(TOLD)

    assert one.uncached == two.uncached == 0
    assert two.cost < one.cost < silent.cost


def test_blocks_of_which_no_pieces_can_be_made_are_not_taken_in() -> None:
    three = Three(Role.DECODE)
    assert three.chooser.take_event([three.one], 16, Place.ENGINE, [1], stored=True)
    assert three.chooser.take_event([three.one], 128, Place.ENGINE, [2], stored=True)
    assert three.chooser.block_tokens == 128
    assert not three.chooser.take_event([three.one], 33, Place.ENGINE, [2], stored=True)
