"""What is found of a request's chunks: runs from the beginning, and last chunks before a boundary, all leased."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ems.pool.client.answers import Lease
from ems.pool.keys import KEY_BYTES, KeyChain, cut
from ems.pool.layout import REF_BYTES
from ems.vllm.offloading.search import MOST_BACKWARDS, Found, Group, search
from ems.vllm.planes import Plane, page_keys

TOKENS = 4
CHAINS = {TOKENS: KeyChain("t/m/f", TOKENS)}
CHAINS[TOKENS].extend(range(200 * TOKENS))


def chains(chunks: int) -> dict[int, KeyChain]:
    chain = KeyChain("t/m/f", TOKENS)
    chain.extend(range(chunks * TOKENS))
    return {TOKENS: chain}


def pages(plane: int, chunks: Sequence[int], shards: int = 1) -> set[tuple[int, bytes]]:
    """The pages of some chunks in a plane."""
    keys = b"".join(CHAINS[TOKENS].packed(chunk, chunk + 1) for chunk in chunks)
    return {(plane, key) for key in cut(page_keys(keys, shards), KEY_BYTES)}


def ref(plane: int, key: bytes) -> bytes:
    return bytes([plane]) + key[: REF_BYTES - 1]


class Pool:
    """``present`` pages by plane; ``node`` answers, and another one after ``other_after`` calls."""

    def __init__(self, present: set[tuple[int, bytes]], other_after: int = 1 << 30) -> None:
        self.present = present
        self.calls = 0
        self.other_after = other_after

    def look(self, plane: int, packed: bytes) -> tuple[int, Lease | None]:
        self.calls += 1
        keys = cut(packed, KEY_BYTES)
        count = next((at for at, key in enumerate(keys) if (plane, key) not in self.present), len(keys))
        if not count:
            return 0, None
        refs = b"".join(ref(plane, key) for key in keys[:count])
        return count, Lease("one" if self.calls <= self.other_after else "two", 1, self.calls, refs)


def found_in(pool: Pool, groups: Sequence[Group], chunks: int, shards: Sequence[int] = (1, 1)) -> Found:
    found = Found()
    search(found, groups, [Plane(str(at), shards=count) for at, count in enumerate(shards)], chains(chunks), pool.look)
    return found


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4))
def test_of_full_attention_the_leading_chunks_that_all_planes_have_are_found(one: int, other: int, shards: int) -> None:
    pool = Pool(pages(0, range(one), shards) | pages(1, range(other)))
    group = Group(0, TOKENS, 0, (0, 1))
    found = found_in(pool, [group], 9, (shards, 1))
    assert [chunk for chunk in range(9) if found.has(group, chunk)] == list(range(min(one, other)))
    for (plane, chunk), refs in found.refs.items():
        if chunk < min(one, other):
            expected = pages(plane, [chunk], shards if plane == 0 else 1)
            assert {*cut(refs, REF_BYTES)} == {ref(plane, key) for _, key in expected}
    assert pool.calls <= 2


def test_a_chunk_of_which_a_shard_is_missing_is_none() -> None:
    present = pages(0, range(5), shards=4)
    last = page_keys(CHAINS[TOKENS].packed(3, 4), 4)[-KEY_BYTES:]
    group = Group(0, TOKENS, 0, (0,))
    found = found_in(Pool(present - {(0, last)}), [group], 5, (4,))
    assert [chunk for chunk in range(5) if found.has(group, chunk)] == [0, 1, 2]


def test_of_a_window_the_last_chunks_before_the_boundary_are_found() -> None:
    pool = Pool(pages(0, range(6)) | pages(1, range(20)))
    full, windowed = Group(0, TOKENS, 0, (0,)), Group(1, TOKENS, 2, (1,))
    found = found_in(pool, [windowed, full], 20)
    assert {chunk for plane, chunk in found.refs if plane == 0} == set(range(6))
    assert {chunk for plane, chunk in found.refs if plane == 1} == {3, 4, 5}


def test_a_state_is_looked_for_backwards_and_not_for_ever() -> None:
    state = Group(0, TOKENS, 1, (0,))
    pool = Pool(pages(0, [3]))
    assert not found_in(pool, [state], 200).refs
    assert pool.calls == MOST_BACKWARDS
    found = found_in(Pool(pages(0, range(150))), [state], 200)
    assert {chunk for _, chunk in found.refs} == {148, 149}


def test_without_the_leading_chunk_windows_are_not_looked_for() -> None:
    pool = Pool(pages(1, range(9)))
    assert not found_in(pool, [Group(0, TOKENS, 0, (0,)), Group(1, TOKENS, 1, (1,))], 9).refs
    assert pool.calls == 1


def test_a_node_that_was_replaced_in_the_middle_is_noticed() -> None:
    found = found_in(Pool(pages(0, range(3)) | pages(1, range(3)), other_after=1), [Group(0, TOKENS, 0, (0, 1))], 3)
    assert found.mixed
    assert len(found.leases) == 2
