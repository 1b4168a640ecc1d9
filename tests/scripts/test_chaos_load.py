"""What the chaos run asks for, breaks and counts."""

from __future__ import annotations

import http.client
import itertools
from pathlib import Path

import pytest

from scripts import chaos, chaos_runner, cluster_chaos
from scripts.chaos_load import CLUSTER_FAULTS, LONGEST, MIX, Job, Load, Tally, cluster_faults, faults, first_difference
from scripts.chaos_runner import Engine, Reference, Runner
from tests.kit.engine import VllmServer

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
    assert all(len(job.prompt) + job.tokens <= chaos_runner.OPTIONS.max_model_len for job in made)
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


def test_all_parts_of_all_hosts_break() -> None:
    broken = list(itertools.islice(cluster_faults(0, 4, 2), 500))

    assert {(fault.part, fault.act) for fault in broken} == set(CLUSTER_FAULTS)
    assert {fault.host for fault in broken if fault.part != "master"} == {0, 1, 2, 3}
    assert {fault.host for fault in broken if fault.part == "master"} == {0, 1}
    assert any(fault.lasts > 10 for fault in broken)
    assert broken == list(itertools.islice(cluster_faults(0, 4, 2), 500))


def test_a_load_for_four_servers_reaches_all() -> None:
    load = Load(0, 4)

    assert {load.next().server for _ in range(100)} == {0, 1, 2, 3}


class Refused(Engine):
    """An engine that takes no connection, and is killed then unless it is ``up`` for ever."""

    def __init__(self, *, killed: bool) -> None:
        super().__init__(VllmServer(Path("none"), log=Path("none")))
        self._killed = killed

    def connect(self, deadline: float) -> http.client.HTTPConnection:
        if self._killed:
            self.up = False
            self.kills += 1
        raise ConnectionRefusedError


@pytest.mark.parametrize("killed", [False, True])
def test_a_request_fails_or_is_cut_with_its_engine(*, killed: bool) -> None:
    tally, engine = Tally(), Refused(killed=killed)
    runner = Runner(tally, [engine], Reference(engine.server, 1.0), 1.0)

    runner.run(Load(0), 0.05, 1)

    assert sum(tally.asked.values()) == sum(tally.cut.values()) + sum(tally.failed.values()) > 0
    assert bool(tally.violations) != killed


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "x"], ["--clients", "0"], ["--model", "none"]])
def test_wrong_usage_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(arguments)

    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--hosts", "1"], ["--masters", "0"]])
def test_a_cluster_is_two_hosts_and_a_master_at_least(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cluster_chaos.main(arguments)

    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
