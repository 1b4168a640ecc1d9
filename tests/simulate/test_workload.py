"""Copies and samples of a trace."""

from __future__ import annotations

from ems.bench.trace.traffic import TraceRequest, block_key, made_trace
from ems.simulate.workload import Workload, sessions_of

TRACE = made_trace("conversations", 400)


def test_one_copy_is_the_trace() -> None:
    work = Workload(TRACE, 1, 1.0, 60.0, seed=3)

    assert work.at.tolist() == [one.at for one in TRACE]
    assert [work.keys(0, number) for number in work.number.tolist()] == [one.keys for one in TRACE]


def test_copies_have_blocks_of_their_own_and_the_same_prefixes() -> None:
    work = Workload(TRACE, 3, 1.0, 60.0, seed=3)

    blocks = [{key for number in range(len(TRACE)) for key in work.keys(copy, number)} for copy in range(3)]

    assert len(blocks[0] | blocks[1] | blocks[2]) == 3 * len(blocks[0])
    assert len(work) == 3 * len(TRACE)
    assert sorted(work.at.tolist()) == work.at.tolist()
    shared = [a == b for a, b in zip(TRACE[0].keys, TRACE[1].keys, strict=False)]
    assert [a == b for a, b in zip(work.keys(2, 0), work.keys(2, 1), strict=False)] == shared


def test_a_session_is_simulated_whole_and_a_smaller_sample_is_part_of_a_larger_one() -> None:
    whole, half, less = (Workload(TRACE, 5, share, 60.0, seed=3) for share in (1.0, 0.5, 0.2))

    counts = {session: whole.session.tolist().count(session) for session in set(whole.session.tolist())}
    for part in (half, less):
        assert all(part.session.tolist().count(one) == counts[one] for one in set(part.session.tolist()))
    assert set(less.session.tolist()) < set(half.session.tolist()) < set(counts)


def test_a_session_is_named_by_its_first_block_that_is_not_a_system_prompt() -> None:
    prompt = block_key(0)
    chains = [[prompt, block_key(1 + number // 2), block_key(1000 + number)] for number in range(400)]

    sessions = sessions_of([TraceRequest(0.0, keys) for keys in chains])

    assert sessions == [number // 2 for number in range(400)]
