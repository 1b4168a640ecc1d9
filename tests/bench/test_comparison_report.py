"""What the comparison with the peers makes of its figures."""

from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from benchmarks.comparison.pairs import compare
from benchmarks.comparison.procedure import Findings, Sizes, ThreeSteps, Turns, Warm
from benchmarks.comparison.report import Entry, Report, Verdict, notes, table, verdict_table, verdicts
from ems.bench.ttft_report import Outcome, Pass, evaluate, summarise

SIZES = Sizes(requests=2, pairs=1)


def three_steps(tokens: int, means: Sequence[float]) -> ThreeSteps:
    passes = [
        Pass(name=str(mean), url="http://server", seconds=1.0, outcomes=[Outcome(first_token=mean, text="x")])
        for mean in means
    ]
    return ThreeSteps(input_tokens=tokens, steps=evaluate(passes), cpu_seconds=[0.5, 0.05, 0.06])


def findings(
    whole: Sequence[float],
    part: Sequence[float],
    *,
    cold: float = 1.0,
    waves: float = 1.0,
    decode: float = 1.0,
    more: float = 0.0,
    above_own: float = 0.0,
    memory: int = 1 << 30,
) -> Findings:
    hit, same = compare([(0.1, 0.1 + more)]), compare([(0.1, 0.1 + above_own)])
    return Findings(
        three_steps=[three_steps(1024, whole), three_steps(1100, part)],
        cold=compare([(1.0, cold)]),
        waves=compare([(1.0, waves)]),
        warm=Warm(own=hit, pool=hit, pool_above_own=same),
        decode=compare([(1.0, decode)]),
        memory=memory,
    )


NONE = findings((6.0, 6.0, 6.0), (6.0, 6.0, 6.0))
PEER = findings((6.1, 0.30, 0.40), (6.1, 1.0, 1.1))
OTHER = findings((6.2, 0.20, 0.50), (6.2, 1.2, 1.0))
GOOD = findings((6.0, 0.20, 0.40), (6.0, 0.4, 0.4), memory=(1 << 30) + (16 << 20))


def test_a_hit_of_the_pool_is_set_against_the_own_cache_of_its_engine_and_of_the_other() -> None:
    turns = Turns(own=[(0.1, 0.2), (0.1, 0.2)], pool=[(0.1, 0.5)])
    turns.add(Turns(pool=[(0.1, 0.5)]))
    warm = turns.warm()

    assert warm.pool is not None
    assert warm.pool_above_own is not None
    assert round(warm.pool.difference, 6) == 0.4
    assert round(warm.pool_above_own.difference, 6) == 0.3
    assert Turns(own=[(0.1, 0.2)]).warm().pool_above_own is None


def report(ems: Findings, **others: Findings) -> Report:
    found = {"none": NONE, "ems": ems, **others}
    entries = {name: Entry(title=name, findings=one) for name, one in found.items()}
    return Report(sizes=SIZES, pool_gib=1, machine="a machine", entries=entries)


def missed(given: Report) -> list[str]:
    return [one.target for one in verdicts(given) if not one.met]


def test_all_targets_met() -> None:
    given = report(GOOD, mooncake=PEER, lmcache=OTHER)

    assert missed(given) == []
    assert len(verdicts(given)) == 9


@pytest.mark.parametrize(
    ("ems", "target"),
    [
        (findings((6.0, 0.21, 0.4), (6.0, 0.4, 0.4)), "1,024 tokens, step 2"),
        (findings((6.0, 0.2, 0.41), (6.0, 0.4, 0.4)), "1,024 tokens, step 3"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.41, 0.4)), "1,100 tokens, step 2: 2.5 x"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.41)), "1,100 tokens, step 3: 2.5 x"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.4), cold=1.02), "cold TTFT"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.4), waves=1.02), "step 1 by turns, 25 at once"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.4), decode=1.03), "further tokens while saving"),
        (findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.4), more=0.011), "hit on 4,096 tokens: at most 10 ms above the own"),
        (
            findings((6.0, 0.2, 0.4), (6.0, 0.4, 0.4), above_own=0.011),
            "hit on 4,096 tokens: at most 10 ms above the same engine's own cache",
        ),
    ],
)
def test_each_target_is_missed_by_itself(ems: Findings, target: str) -> None:
    (only,) = missed(report(ems, mooncake=PEER, lmcache=OTHER))

    assert only.startswith(target)


def test_a_target_within_what_the_pairs_leave_possible_is_open() -> None:
    wide = compare([(1.0, 0.9), (1.0, 1.02), (1.0, 1.3)])
    hit = compare([(0.1, 0.1), (0.1, 0.112), (0.1, 0.13)])
    good = GOOD.warm
    for ems in (
        msgspec.structs.replace(GOOD, cold=wide),
        msgspec.structs.replace(GOOD, warm=msgspec.structs.replace(good, pool_above_own=hit)),
    ):
        (only,) = [one for one in verdicts(report(ems)) if not one.met]
        assert only.open

    far = compare([(1.0, 1.1), (1.0, 1.2), (1.0, 1.3)])
    (only,) = [one for one in verdicts(report(msgspec.structs.replace(GOOD, cold=far))) if not one.met]
    assert not only.open


def test_slow_calls_of_the_scheduler_are_a_miss_that_names_the_call() -> None:
    given = report(GOOD)
    calls = {"quick": summarise([1e-5]), "slow": summarise([2e-3])}
    given = Report(sizes=SIZES, pool_gib=1, machine="a machine", entries=given.entries, scheduler_calls=calls)
    last = verdicts(given)[-1]

    assert (last.met, last.measured) == (False, "2.00 ms (slow)")


def test_without_peers_nothing_is_said_about_them() -> None:
    assert not any("peer" in one.target for one in verdicts(report(GOOD)))


def test_without_ems_there_are_no_targets() -> None:
    entries = {"lmcache": Entry(title="LMCache", findings=PEER)}

    assert verdicts(Report(sizes=SIZES, pool_gib=1, machine="a machine", entries=entries)) == []


def test_a_peer_that_is_not_there_is_named() -> None:
    given = report(GOOD)
    entries = {**given.entries, "lmcache": Entry(title="LMCache", absent="it is not installed")}
    given = Report(sizes=SIZES, pool_gib=1, machine="a machine", entries=entries)

    assert notes(given) == ["LMCache is left out: it is not installed"]
    assert row(given, "1,024 tokens, TTFT step 2")[-1] == "-"


def test_rows_of_the_table() -> None:
    given = report(GOOD, mooncake=PEER)

    assert row(given, "1,024 tokens, TTFT step 2, mean ms") == ["6,000", "200", "(30.00", "x)", "300", "(20.00", "x)"]
    assert row(given, "memory of all processes, MiB") == ["1,024", "1,040", "1,024"]
    assert row(given, "the same beyond no pool, MiB a prompt kept") == ["-", "2.0", "0.0"]


def row(given: Report, label: str) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(given))
    (line,) = [line for line in capture.get().splitlines() if label in line]
    return line.partition(label)[2].replace(", mean ms", "").split()


def test_table_of_targets() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(verdict_table([Verdict(target="a", measured="1 x", met=True)]))
        console.print(verdict_table([Verdict(target="b", measured="9 x", met=False)]))
        console.print(verdict_table([Verdict(target="c", measured="2 x", met=False, open=True)]))

    assert "met" in capture.get()
    assert capture.get().count("MISSED") == 1
    assert "open" in capture.get()
