"""What is found of a request's chunks: runs from the beginning, and last chunks before a boundary, all leased."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client.answers import Lease
from ems.pool.layout import REF_BYTES
from ems.vllm.offloading.search import MOST_BACKWARDS, Found, Group, search


class Pool:
    """Pages by rank and group; ``node`` answers, and another one after ``calls`` calls."""

    def __init__(self, present: set[tuple[int, int, bytes]], other_after: int = 1 << 30) -> None:
        self.present = present
        self.calls = 0
        self.other_after = other_after

    def look(self, place: int, rank: int, keys: list[bytes]) -> tuple[int, Lease | None]:
        self.calls += 1
        count = next((at for at, key in enumerate(keys) if (rank, place, key) not in self.present), len(keys))
        if not count:
            return 0, None
        refs = b"".join(bytes([rank, place]) + key.ljust(REF_BYTES - 2, b".") for key in keys[:count])
        return count, Lease("one" if self.calls <= self.other_after else "two", 1, self.calls, refs)


def keys(count: int, group: int = 0) -> list[bytes]:
    return [b"%d-%d" % (group, number) for number in range(count)]


def found_in(pool: Pool, groups: Sequence[Group], chunks: dict[int, list[bytes]], ranks: int = 1) -> Found:
    found = Found()
    search(found, groups, chunks, ranks, pool.look)
    return found


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_of_full_attention_the_leading_chunks_that_all_ranks_have_are_found(one: int, other: int, ranks: int) -> None:
    counts = [one, other, 9][:ranks]
    pool = Pool({(rank, 0, key) for rank in range(ranks) for key in keys(counts[rank])})
    found = found_in(pool, [Group(0, 256)], {0: keys(9)}, ranks)
    assert list(found.refs) == keys(min(counts))
    for key, refs in found.refs.items():
        assert [ref[:2] for ref in refs] == [bytes([rank, 0]) for rank in range(ranks)]
        assert all(key in ref for ref in refs)
    assert pool.calls == ranks
    assert len(found.leases) == sum(count > 0 for count in counts)


def test_of_a_window_the_last_chunks_before_the_boundary_are_found() -> None:
    pool = Pool({(0, 0, key) for key in keys(6)} | {(0, 1, key) for key in keys(20, 1)})
    found = found_in(pool, [Group(0, 256), Group(1, 256, window=2)], {0: keys(10), 1: keys(20, 1)})
    assert set(found.refs) == {*keys(6), *keys(20, 1)[3:6]}


def test_a_state_is_looked_for_backwards_and_not_for_ever() -> None:
    pool = Pool({(0, 0, keys(200)[3])})
    found = found_in(pool, [Group(0, 32, window=1)], {0: keys(200)})
    assert not found.refs
    assert pool.calls == MOST_BACKWARDS
    pool = Pool({(0, 0, key) for key in keys(200)[:150]})
    assert set(found_in(pool, [Group(0, 32, window=1)], {0: keys(200)}).refs) == set(keys(200)[148:150])


def test_without_the_leading_chunk_windows_are_not_looked_for() -> None:
    pool = Pool({(0, 1, key) for key in keys(9, 1)})
    assert not found_in(pool, [Group(0, 256), Group(1, 256, window=1)], {0: keys(9), 1: keys(9, 1)}).refs
    assert pool.calls == 1


def test_a_node_that_was_replaced_in_the_middle_is_noticed() -> None:
    pool = Pool({(rank, 0, key) for rank in (0, 1) for key in keys(3)}, other_after=1)
    found = found_in(pool, [Group(0, 256)], {0: keys(3)}, 2)
    assert found.mixed
    assert len(found.leases) == 2
