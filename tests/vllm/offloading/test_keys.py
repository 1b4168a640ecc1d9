"""The pool's keys of chunks, and which chunk comes before which."""

from __future__ import annotations

from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from ems.pool.keys import KEY_BYTES, NO_PARENT
from ems.vllm.offloading.keys import ChunkKeys, group_of


def context_of(chunks: int, groups: int = 2, tokens: int = 64) -> ReqContext:
    """As vLLM's scheduler writes it."""
    context = ReqContext("request")
    for group in range(groups):
        for number in range(chunks):
            key = make_offload_key(b"hash of block %02d" % number, group)
            context.set_offload_key_position(key, (number + 1) * tokens)
    return context


def test_parents_are_the_chunks_before_in_the_same_group() -> None:
    context = context_of(3)
    ends = context._offload_key_positions
    keys = ChunkKeys("chain", {0: 64, 1: 64}, ends)
    chunks = keys.chunks()
    assert [len(of_group) for of_group in chunks.values()] == [3, 3]
    for group, of_group in chunks.items():
        assert [group_of(key) for key in of_group] == [group] * 3
        assert keys.parent(of_group[0]) == NO_PARENT
        assert [keys.parent(key) for key in of_group[1:]] == [keys.pool_key(key) for key in of_group[:-1]]
    assert len({keys.pool_key(key) for of_group in chunks.values() for key in of_group}) == 6
    assert {len(keys.pool_key(key)) for key in ends} == {KEY_BYTES}


def test_chunks_that_come_later_are_known_and_parts_of_chunks_are_not_looked_for() -> None:
    context = context_of(1, groups=1)
    keys = ChunkKeys("chain", {0: 64}, context._offload_key_positions)
    assert len(keys.chunks()[0]) == 1
    later, part = make_offload_key(b"later", 0), make_offload_key(b"part", 0)
    context.set_offload_key_position(later, 128)
    context.set_offload_key_position(part, 96)
    assert keys.chunks()[0][1:] == [later]
    assert keys.parent(later) == keys.pool_key(keys.chunks()[0][0])


def test_keys_of_other_weights_are_others() -> None:
    key = make_offload_key(b"hash", 0)
    assert ChunkKeys("one", {0: 1}, {}).pool_key(key) != ChunkKeys("two", {0: 1}, {}).pool_key(key)
