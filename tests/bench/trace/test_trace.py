"""Traces read, replayed and compared; the optimum against the plainest account of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.bench.trace.compare import TracePlan, compare, plot, table, tier_table
from ems.bench.trace.replay import optimal_hits, pool_of, replay
from ems.bench.trace.traffic import KINDS, TraceRequest, block_key, made_trace, read_trace
from ems.cli import run
from ems.config import POLICIES, PolicyName
from ems.errors import ConfigError


def request(*names: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, [block_key(name) for name in names])


def quiet(what: str, done: int, total: int) -> None:
    pass


# Files


def test_a_trace_is_read_in_the_order_of_its_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 2000, "hash_ids": [1, 2], "input_length": 9}, {"timestamp": 500, "hash_ids": [1]}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n\n{"timestamp": 1, "hash_ids": []}\n')
    assert read_trace(path) == [request(1, at=0.5), request(1, 2, at=2.0)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no requests"),
        ("nonsense", "line 1"),
        ('{"timestamp": 0, "hash_ids": [1]}\n{"hash_ids": [1]}', "line 2"),
        ('{"timestamp": 0, "hash_ids": ["a"]}', "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "missing.jsonl")


# Replay


@pytest.mark.parametrize("capacity", [1, 5, 8, 100])
def test_a_pool_has_exactly_the_slots_that_were_asked_for(capacity: int) -> None:
    core, namespace = pool_of(capacity, "lru")
    replay([request(*range(3 * capacity))], capacity, "lru")
    granted = core.writing.reserve(1, namespace, bytes(16), [block_key(name) for name in range(3 * capacity)]).granted
    assert len(granted) == capacity


def test_hits_count_with_their_whole_prefix_only() -> None:
    trace = [request(1, 2, 3), request(1, 2, 4), request(9, 2, 3)]
    replayed = replay(trace, 100, "lru")
    assert (replayed.blocks, replayed.hits) == (9, 2)


def lru_hits(trace: list[TraceRequest], capacity: int) -> int:
    """LRU as plain as it gets."""
    order: list[bytes] = []
    hits = 0
    for one in trace:
        hits += next((at for at, key in enumerate(one.keys) if key not in order), len(one.keys))
        order = [key for key in order if key not in one.keys] + one.keys[::-1]
        del order[: max(len(order) - capacity, 0)]
    return hits


def test_lru_replayed_is_lru() -> None:
    trace = made_trace("conversations", 600)
    expected = lru_hits(trace, 300)
    # The pool evicts a few pages at a time, so that its last slots are empty now and then.
    assert replay(trace, 300, "lru").hits == pytest.approx(expected, rel=0.02)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_nothing_beats_the_optimum_on_single_blocks(prompts: list[list[int]], capacity: int) -> None:
    trace = [request(name) for prompt in prompts for name in prompt]
    names = [one.keys[0] for one in trace]
    most = 0
    for kept in itertools.product([False, True], repeat=len(names)):
        # Keep the block of a step until its next use, or not at all.
        spans = [
            (at, names.index(name, at + 1)) for at, name in enumerate(names) if kept[at] and name in names[at + 1 :]
        ]
        # One that is kept fills a slot from its step until just before its next use.
        if all(sum(begin <= at < end for begin, end in spans) <= capacity for at in range(len(names))):
            most = max(most, len(spans))
        if len(names) > 9:
            break
    if len(names) <= 9:
        assert optimal_hits(trace, capacity) == most


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_beats_the_optimum(policy: PolicyName, kind: str) -> None:
    trace = made_trace(kind, 300)
    assert replay(trace, 200, policy).hits <= optimal_hits(trace, 200)


def test_made_up_traffic_depends_on_its_seed_alone() -> None:
    for kind in KINDS:
        assert made_trace(kind, 50, 7) == made_trace(kind, 50, 7)
    assert made_trace("documents", 50, 7) != made_trace("documents", 50, 8)


@pytest.mark.slow
def test_a_queue_that_is_announced_brings_hits() -> None:
    trace = made_trace("documents", 1200)
    blind, seeing = (replay(trace, 400, "forecast", look_ahead=ahead).share for ahead in (0, 32))
    assert seeing > blind


# A tier below


@pytest.mark.slow
def test_what_waits_is_brought_up_in_time() -> None:
    trace = made_trace("documents", 1200)
    blind = replay(trace, 400, "forecast", tier_rate=1e4)
    seeing = replay(trace, 400, "forecast", look_ahead=8, tier_rate=1e4)
    assert blind.blocks == seeing.blocks
    assert blind.brought == 0
    assert blind.in_memory < 0.8
    assert seeing.in_memory > 0.95


@pytest.mark.slow
def test_a_tier_that_is_too_slow_brings_up_less() -> None:
    trace = made_trace("documents", 600)
    slow, fast = (replay(trace, 400, "forecast", look_ahead=8, tier_rate=rate) for rate in (1, 1e4))
    assert slow.in_memory < fast.in_memory


# The verb


@pytest.mark.slow
def test_a_comparison_has_every_policy_and_the_optimum(tmp_path: Path) -> None:
    plan = TracePlan(("forecast", "lru"), (100, 200), 4, 50.0)
    found = compare(made_trace("conversations", 120), plan, quiet)
    assert [(row.policy, row.capacity) for row in found.rows] == [
        (policy, capacity) for capacity in (100, 200) for policy in ("forecast", "lru")
    ]
    assert all(
        row.share <= best for row, best in zip(found.rows, [found.optimum[at // 2] for at in range(4)], strict=True)
    )
    assert len(table(found).rows) == 2
    tiers = tier_table(found)
    assert tiers is not None
    assert len(tiers.rows) == 4
    plot(found, tmp_path / "hits.svg")
    assert "<svg" in (tmp_path / "hits.svg").read_text()
    with pytest.raises(ConfigError, match="cannot draw"):
        plot(found, tmp_path / "hits.nonsense")


def test_what_cannot_be_drawn_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ems.cli.bench.compare", lambda *_: pytest.fail("it computes"))
    monkeypatch.setattr("ems.bench.trace.compare.find_spec", lambda _: None)
    assert run(["bench", "trace", "made:loop", "--plot", str(tmp_path / "hits.svg")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    monkeypatch.setattr("ems.bench.trace.compare.find_spec", lambda _: "there")
    for path in (tmp_path / "hits", tmp_path / "none" / "hits.svg"):
        assert run(["bench", "trace", "made:loop", "--plot", str(path)]) == 2


def test_the_verb_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "forecast,arc", "--capacity", "100", "--requests", "80", "-o", "json"]
    assert run(["bench", "trace", "made:loop", *arguments]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert [row["policy"] for row in found["rows"]] == ["forecast", "arc"]
    assert "optimum at 100" in told.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["made:nothing"], "no made-up traffic called 'nothing'"),
        (["made:loop", "--policy", "fifo"], "no policy called 'fifo'"),
        (["made:loop", "--capacity", "many"], "--capacity is 'many'"),
        (["made:loop", "--capacity", "0"], "above 0"),
        (["made:loop", "--look-ahead", "-1"], "cannot be negative"),
        (["missing.jsonl"], "cannot read the trace"),
    ],
)
def test_a_mistake_in_usage_is_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "trace", *arguments]) == 2
    assert told in capsys.readouterr().err
