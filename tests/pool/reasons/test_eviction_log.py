"""What is remembered of keys that are gone: exact within its bound, and bounded."""

from __future__ import annotations

import tracemalloc
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.reasons.eviction_log import CAPACITY, EvictionLog
from ems.pool.reasons.words import CODES, Reason
from tests.pool.brain import key

known = [code for code in range(1, CODES) if Reason.of_code(code) is not None]
notes = st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(known), st.integers(-1, 5))


@given(st.lists(notes, max_size=60), st.integers(1, 12))
def test_the_last_notes_are_known_exactly_and_no_others(history: list[tuple[int, int, int, int]], bound: int) -> None:
    eviction_log = EvictionLog(bound)
    kept: deque[tuple[int, int, int, int, float]] = deque(maxlen=bound)
    for now, (namespace, name, code, winner) in enumerate(history):
        eviction_log.now = float(now)
        eviction_log.note(namespace, key(name), code, winner)
        kept.append((namespace, name, code, winner, float(now)))
    newest = {(namespace, name): rest for namespace, name, *rest in kept}
    for namespace in range(3):
        for name in range(10):
            found = eviction_log.find(namespace, key(name))
            expected = newest.get((namespace, name))
            if expected is None:
                assert found is None
                assert eviction_log.code(namespace, key(name)) == 0
            else:
                assert found is not None
                assert [found.reason.code, found.winner, found.at] == expected
                assert eviction_log.code(namespace, key(name)) == expected[0]
    assert len(eviction_log._places) == len(newest)


@pytest.mark.slow
def test_a_full_memory_stays_below_what_is_promised_a_note() -> None:
    tracemalloc.start()
    try:
        eviction_log = EvictionLog()
        for number in range(2 * CAPACITY):
            eviction_log.note(0, number.to_bytes(8, "little") * 2, Reason.EVICTED_FULL.code)
        size, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 168 * CAPACITY
    assert most < 300 * CAPACITY
    assert len(eviction_log._places) == CAPACITY


def test_every_code_is_a_reason_of_its_own() -> None:
    reasons = {code: Reason.of_code(code) for code in range(1, CODES)}
    assert [code for code, reason in reasons.items() if reason is None] == [8], "a number is given once"
    assert all(reason is None or reason.code == code for code, reason in reasons.items())
    assert len({reason for reason in Reason if reason.code}) == CODES - 2
    assert Reason.of_code(0) is None
    assert Reason.of_code(200) is None
    assert all(reason.sentence for reason in Reason)
