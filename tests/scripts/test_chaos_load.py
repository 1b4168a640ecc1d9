"""What the chaos run asks for, breaks and counts."""

from __future__ import annotations

import itertools

import pytest

from scripts import chaos
from scripts.chaos_load import LONGEST, MIX, Job, Load, Tally, faults, first_difference

JOB = Job("fresh", 0, (300, 301), 3)


def jobs(seed: int, count: int) -> list[Job]:
    load = Load(seed)
    made = []
    for number in range(count):
        made.append(load.next())
        if made[-1].leave_after is None:
            load.answered(made[-1], tuple(range(400 + number % 50, 400 + number % 50 + made[-1].tokens)))
    return made


def test_the_same_seed_makes_the_same_load() -> None:
    assert jobs(3, 200) == jobs(3, 200)
    assert jobs(3, 200) != jobs(4, 200)


def test_a_load_is_varied_and_fits_the_engines() -> None:
    made = jobs(0, 2000)

    assert {job.kind for job in made} == set(MIX)
    assert {job.server for job in made} == {0, 1}
    assert all(1 <= len(job.prompt) <= LONGEST for job in made)
    assert all(len(job.prompt) + job.tokens <= chaos.OPTIONS.max_model_len for job in made)
    assert all((job.leave_after is not None) == (job.kind == "leave") for job in made)


def test_much_of_a_load_was_asked_before() -> None:
    """Prompts that begin as an earlier one went on: what a pool is for."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    for job in jobs(0, 500):
        blocks = [job.prompt[:end] for end in range(32, len(job.prompt) + 1, 32)]
        again += bool(blocks) and blocks[0] in seen
        seen.update(blocks)

    assert again > 250


def test_a_turn_goes_on_from_an_answer() -> None:
    load = Load(0)
    load.answered(JOB, (500, 501, 502))

    turn = next(job for job in iter(load.next, None) if job.kind == "turn")

    assert turn.prompt[:5] == (300, 301, 500, 501, 502)
    assert len(turn.prompt) > 5


def test_faults_are_seeded_and_of_both_kinds() -> None:
    some = list(itertools.islice(faults(1), 100))

    assert some == list(itertools.islice(faults(1), 100))
    assert {fault.kind for fault in some} == {"kill", "freeze"}
    assert all(fault.after > 0 and fault.lasts >= 0 for fault in some)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((7, 8, 9), (7, 8, 9), None), ((7, 8, 8), (7, 8, 9), 2), ((7, 8), (7, 8, 9), 2), ((), (7,), 0)],
)
def test_where_answers_part(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    assert first_difference(one, other) == place


def test_another_token_than_the_reference_says_is_wrong() -> None:
    tally = Tally()
    tally.differs(JOB, 2, (7, 8, 8), {9: -0.5, 8: -1.0})

    assert tally.wrong["fresh"] == 1
    assert "token 2 of the answer is 8, but an engine without a connector says 9" in tally.violations[0]


@pytest.mark.parametrize("answer", [(7, 8), (7, 8, 400)], ids=["too-short", "unlikely"])
def test_an_answer_that_no_tie_explains_is_wrong(answer: tuple[int, ...]) -> None:
    tally = Tally()
    tally.differs(JOB, 2, answer, {9: -0.5, 8: -0.5})

    assert tally.wrong["fresh"] == 1


def test_two_tokens_that_are_as_likely_are_a_tie() -> None:
    tally = Tally()
    tally.differs(JOB, 2, (7, 8, 8), {9: -0.500, 8: -0.515})

    assert tally.ties["fresh"] == 1
    assert not tally.violations


def test_what_is_held_at_the_end_is_a_violation() -> None:
    tally = Tally()
    tally.leftovers("pool", {"leases": 0, "reservations": 2})

    assert tally.violations == ["pool: reservations is 2, expected 0"]


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "x"], ["--clients", "0"], ["--model", "none"]])
def test_wrong_usage_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(arguments)

    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
