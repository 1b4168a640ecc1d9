"""Blocks that are not full: found by the tokens that they share, and only while they are here."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.core.index import MAX_TAILS
from ems.pool.core.pool_core import PoolCore
from ems.pool.keys import NO_PARENT, KeyChain, Tail
from tests.pool.wrong_core import wrong_core

PAGE = 4096
tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def make_core(slots: int = 64) -> PoolCore:
    size = (slots + 2) * (PAGE + 64) + 8192
    core = PoolCore([size], high_watermark=1.0)
    core.slots.touch(0, size)
    core.slots.touching_ended()
    core.open_namespace("tenant/model/layout", PAGE)
    return core


def chain_of(seed: int = 0) -> KeyChain:
    chain = KeyChain("tenant/model/layout", 8)
    chain.extend([seed] * 8)
    return chain


def store(core: PoolCore, chain: KeyChain, tokens: list[int], *, commit: bool = True) -> int:
    """Reserve (and commit) a full block with ``tokens`` behind it; the reservation's number, 0 when all was there."""
    tail = chain.tail(1, tokens)
    reserved = core.writing.reserve(1, 0, NO_PARENT, [chain[0:1][0], tail.key], [None, tail])
    if commit and reserved.granted:
        core.writing.commit(1, reserved.reservation)
    return reserved.reservation


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@given(st.lists(tokens_lists, max_size=10), tokens_lists)
def test_the_page_that_shares_most_is_found(stored: list[list[int]], wanted: list[int]) -> None:
    core, chain = make_core(), chain_of()
    for tokens in stored:
        store(core, chain, tokens)

    count, found = core.reading.lookup_tail(1, 0, chain.tail(1, wanted), lease=True)

    assert count == max((shared(tokens, wanted) for tokens in stored), default=0)
    assert len(found.pages) == (count > 0)
    assert wrong_core(core) == []


def test_the_same_tokens_behind_another_prefix_are_not_found() -> None:
    core = make_core()
    store(core, chain_of(1), [5, 6, 7])

    assert core.reading.lookup_tail(1, 0, chain_of(2).tail(1, [5, 6, 7]), lease=False)[0] == 0
    assert core.reading.lookup_tail(1, 0, chain_of(1).tail(1, [5, 6, 7], ("salt", "x")), lease=False)[0] == 0
    assert core.reading.lookup_tail(1, 0, chain_of(1).tail(1, [5, 6, 7]), lease=False)[0] == 3


def test_a_page_that_is_being_written_is_announced_and_not_given() -> None:
    core, chain = make_core(), chain_of()
    store(core, chain, [1, 2])
    reservation = store(core, chain, [1, 2, 3, 4], commit=False)

    count, found = core.reading.lookup_tail(1, 0, chain.tail(1, [1, 2, 3]), lease=False)
    assert (count, found.pending) == (2, 1)
    core.writing.abort(1, reservation)
    count, found = core.reading.lookup_tail(1, 0, chain.tail(1, [1, 2, 3]), lease=False)
    assert (count, found.pending) == (2, 0)
    assert wrong_core(core) == []


def test_a_leased_page_stays_and_others_leave_the_directory_when_they_are_evicted() -> None:
    core, chain = make_core(slots=8), chain_of()
    store(core, chain, [1, 2, 3])
    _, found = core.reading.lookup_tail(1, 0, chain.tail(1, [1, 2, 3]), lease=True)
    for seed in range(2, 40):
        store(core, chain_of(seed), [seed])

    assert core.reading.lookup_tail(1, 0, chain.tail(1, [1, 2, 3]), lease=False)[0] == 3
    assert core.reading.lookup_tail(1, 0, chain_of(2).tail(1, [2]), lease=False)[0] == 0
    core.reading.release(1, found.lease)
    assert wrong_core(core) == []


def test_a_directory_lists_a_bounded_number_of_pages() -> None:
    core, chain = make_core(), chain_of()
    for number in range(MAX_TAILS + 5):
        store(core, chain, [1000 + number])

    listed = [
        core.reading.lookup_tail(1, 0, chain.tail(1, [1000 + number]), lease=False)[0]
        for number in range(MAX_TAILS + 5)
    ]
    assert listed == [0] * 5 + [1] * MAX_TAILS
    assert wrong_core(core) == []


@given(tokens_lists, tokens_lists)
def test_shared_tokens_are_counted_one_by_one(one: list[int], other: list[int]) -> None:
    tail = Tail(bytes(16), np.asarray(one, dtype="<i4").tobytes())

    assert tail.common(np.asarray(other, dtype="<i4").tobytes()) == shared(one, other)
