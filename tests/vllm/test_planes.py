"""How blocks are cut into pages: nothing is lost, stored twice or named twice, whatever the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.errors import ConfigError
from ems.pool.keys import KEY_BYTES, NO_PARENT, page_key, page_keys
from ems.vllm.planes import first_in_sight, portion, shard_count


@given(heads=st.integers(1, 64), power=st.integers(0, 6), blocks=st.integers(1, 20))
def test_the_ranks_together_store_every_page_once(heads: int, power: int, blocks: int) -> None:
    ranks = 2**power
    holders = ranks // max(ranks // heads, 1)
    if heads % holders or (ranks > heads and ranks % heads):
        with pytest.raises(ConfigError, match="--tensor-parallel-size"):
            portion(heads, shard_count(heads, min(ranks, heads)), ranks, 0)
        return
    shards = shard_count(heads, holders)
    stored = []
    for rank in range(ranks):
        mine = portion(heads, shards, ranks, rank)
        held = range(mine.first, mine.first + mine.count)
        stored += [(block, shard) for block in range(blocks) if mine.stores(block) for shard in held]
        assert set(held) <= set(range(shards))
    assert sorted(stored) == [(block, shard) for block in range(blocks) for shard in range(shards)]


@given(heads=st.sampled_from([1, 2, 4, 8, 16, 32, 40]), power=st.integers(0, 3))
def test_usual_sizes_share_their_pages(heads: int, power: int) -> None:
    """An engine with up to 8 ranks cuts blocks as an engine with one does."""
    assert shard_count(heads, min(2**power, heads)) == shard_count(heads, 1)


def test_a_size_that_does_not_fit_is_refused_with_what_would() -> None:
    assert shard_count(32, 16) == 16
    assert shard_count(32, 2, 4) == 4
    with pytest.raises(ConfigError, match="expected a divisor of the model's 8 KV heads"):
        shard_count(8, 1, 3)
    with pytest.raises(ConfigError, match="set store_tp_size to a multiple of 4"):
        shard_count(8, 4, 2)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=5), st.integers(1, 9))
def test_pages_are_named_one_by_one_or_all_at_once(keys: list[bytes], shards: int) -> None:
    named = page_keys(b"".join(keys), shards)
    single = [page_key(key, shard) for key in keys for shard in range(shards)]
    if NO_PARENT not in keys:
        assert named == b"".join(single)
        assert len(set(single)) == len(set(keys)) * shards


def test_the_first_block_has_no_parent_in_any_shard() -> None:
    assert page_key(NO_PARENT, 3) == NO_PARENT


@given(window=st.integers(1, 50), tokens=st.integers(0, 200), size=st.integers(1, 16))
def test_a_window_begins_in_the_block_of_the_first_token_in_sight(window: int, tokens: int, size: int) -> None:
    seen = range(max(tokens - window + 1, 0), tokens + 1)
    assert first_in_sight(window, tokens, size) == seen[0] // size
    assert first_in_sight(0, tokens, size) == 0
