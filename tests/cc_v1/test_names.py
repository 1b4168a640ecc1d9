"""Keys of integer hashes, and which block is known to come before which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.cc_v1 import names
from ems.cc_v1.names import BlockNames
from ems.pool.keys import KEY_BYTES, NO_PARENT, integer_key


@given(st.lists(st.integers(), min_size=2, max_size=50, unique=True))
def test_every_integer_has_two_keys_of_its_own(values: list[int]) -> None:
    block = BlockNames("tenant/model/layout")
    keys = [block.whole(value) for value in values] + [block.beginning(value) for value in values]
    assert len(set(keys)) == 2 * len(values)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert keys == [block.key(value, whole=True) for value in values] + [block.key(v, whole=False) for v in values]


def test_keys_do_not_depend_on_the_process() -> None:
    """The keys of version 1: another value here would make every stored page unreachable."""
    assert BlockNames("n").whole(-3) == integer_key(-3, "n")
    assert BlockNames("n").whole(-3).hex() == "5307af8867d3f5c993be2814085cd8c1"
    assert BlockNames("n").beginning(-3).hex() == "b6a3825e60dbd47148bcdb47bb5cd924"


def test_namespaces_share_no_key() -> None:
    assert BlockNames("a").whole(1) != BlockNames("b").whole(1)


def test_the_block_before_is_remembered() -> None:
    block = BlockNames("n")
    block.remember([1, 2, 3])
    block.remember([9])
    assert block.before(1) == NO_PARENT
    assert block.before(2) == block.whole(1)
    assert block.before(3) == block.whole(2)
    assert block.before(9) == NO_PARENT


def test_memory_is_bounded_and_keeps_what_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "REMEMBERED", 100)
    block = BlockNames("n")
    for start in range(0, 10_000, 10):
        block.remember(list(range(start, start + 11)))
        assert len(block._young) + len(block._old) <= 2 * 100 + 10
    assert block.before(10_000) == block.whole(9_999)
    assert block.before(9_901) == block.whole(9_900)
    assert block.before(5) == NO_PARENT
