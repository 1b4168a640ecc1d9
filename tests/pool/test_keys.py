"""Keys are equal for equal prefixes and different otherwise, on every host and in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.pool.keys import (
    KEY_BYTES,
    NO_PARENT,
    KeyChain,
    directories_of,
    fingerprint,
    integer_key,
    namespace_name,
    root_key,
)

TOKENS = st.lists(st.integers(0, 2**31), max_size=40)
EXTRA = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.tuples(st.text(max_size=2))
EXTRAS = st.lists(EXTRA, max_size=6)


def keys(
    tokens: list[int], extra: list[object] | None = None, namespace: str = "n", block_size: int = 4
) -> list[bytes]:
    chain = KeyChain(namespace, block_size)
    chain.extend(tokens, extra or [])
    return list(chain)


@given(TOKENS, EXTRAS, st.lists(st.integers(0, 40), max_size=5))
def test_a_chain_grown_in_steps_equals_one_made_at_once(
    tokens: list[int], extra: list[object], steps: list[int]
) -> None:
    grown = KeyChain("n", 4)
    for step in sorted(steps):
        grown.extend(tokens[:step], extra)
    assert grown.extend(tokens, extra) == len(tokens) // 4
    assert list(grown) == keys(tokens, extra)


@given(TOKENS)
def test_keys_are_a_plain_hash_of_what_came_before(tokens: list[int]) -> None:
    last = hashlib.sha256(b"ems-block-v1\0n").digest()[:16]
    expected = []
    for start in range(0, len(tokens) - 3, 4):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 4])
        directory = hashlib.sha256(b"ems-tail-v1\0" + last).digest()[:16]
        last = hashlib.sha256(directory + raw).digest()[:16]
        expected.append(last)
    assert keys(tokens) == expected


@given(st.lists(st.integers(0, 100), min_size=12, max_size=12), st.integers(0, 11), st.integers(1, 50))
def test_another_token_changes_its_block_and_all_behind_it(tokens: list[int], at: int, change: int) -> None:
    other = [*tokens[:at], tokens[at] + change, *tokens[at + 1 :]]
    same = [one == two for one, two in zip(keys(tokens), keys(other), strict=True)]
    assert same == [block < at // 4 for block in range(3)]


@given(EXTRAS, EXTRAS)
def test_whatever_else_changes_the_state_changes_the_key(one: list[object], two: list[object]) -> None:
    tokens = list(range(4 * 6))
    filled = [[*extra, *[None] * (6 - len(extra))] for extra in (one, two)]
    differs = next((at for at in range(6) if filled[0][at] != filled[1][at]), 6)
    same = [left == right for left, right in zip(keys(tokens, one), keys(tokens, two), strict=True)]
    assert same == [block < differs for block in range(6)]


def test_an_extra_of_another_type_is_another_extra() -> None:
    found = {keys([1, 2, 3, 4], [extra])[0] for extra in (None, 0, 1, 1.0, True, "1", b"1", ("1",), {"1": 1}, "")}
    assert len(found) == 10


def test_the_order_of_a_mapping_does_not_matter() -> None:
    assert keys([1, 2, 3, 4], [{"a": 1, "b": 2}]) == keys([1, 2, 3, 4], [{"b": 2, "a": 1}])
    assert fingerprint({"a": 1, "b": {"x": 1, "y": 2}}) == fingerprint({"b": {"y": 2, "x": 1}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_another_namespace_or_block_boundary_shares_no_key() -> None:
    tokens = list(range(16))
    assert not set(keys(tokens)) & set(keys(tokens, namespace="m"))
    assert keys(tokens, block_size=8)[0] not in keys(tokens, block_size=4)


def test_tokens_do_not_run_into_each_other() -> None:
    assert keys([1, 0, 0, 0]) != keys([256, 0, 0, 0]) != keys([0, 1, 0, 0])


SCRIPT = """
from ems.pool.keys import KeyChain, fingerprint, integer_key
chain = KeyChain("tenant/model/x", 2)
chain.extend([5, 6, 7, 8, 9], [("lora", {"b", "a", "c"}), {"y": 1, "x": frozenset("pq")}])
print(chain.packed(0, 2).hex(), integer_key(-2**70, "n").hex(), fingerprint({"b": {"z", "y"}, "a": 1}))
"""


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242", "random")
    }
    assert len(said) == 1
    # A pool outlives the release that wrote it: another key for the same state would make all its pages useless.
    assert said.pop().split() == [
        "e4cc4ceec1e534a66558f45d77612eb84198635755218b83596fb564d83910cb",
        "aed63373ac4bd9f2e244560c5ebdc717",
        "14781d67ee3fcc588bdd1bb0acf26ca1",
    ]


@given(st.integers(), st.integers())
def test_every_integer_names_a_block_of_its_own(one: int, two: int) -> None:
    left, right = integer_key(one, "n"), integer_key(two, "n")
    assert len(left) == KEY_BYTES
    assert (left == right) == (one == two)
    assert left != integer_key(one, "m")


@pytest.mark.parametrize("value", [0, 1, -1, 127, 128, -128, -129, 255, 256, 2**63, -(2**63), 2**64, 10**100])
def test_integers_of_every_length_are_told_apart(value: int) -> None:
    others = {value - 1, value + 1, -value, value * 256, value + 256} - {value}
    assert integer_key(value, "n") not in {integer_key(other, "n") for other in others}


@given(st.text(), st.text(), st.text(), st.text())
def test_a_name_says_exactly_whose_it_is(tenant: str, model: str, other_tenant: str, other_model: str) -> None:
    same = namespace_name(tenant, model, "f") == namespace_name(other_tenant, other_model, "f")
    assert same == ((tenant, model) == (other_tenant, other_model))


def test_a_slash_moved_from_the_model_to_the_tenant_is_another_name() -> None:
    assert namespace_name("a", "b/c", "f") != namespace_name("a/b", "c", "f")
    assert namespace_name("default", "Qwen/Qwen2.5-7B", "f") == "default/Qwen/Qwen2.5-7B/f"


def test_joined_keys_and_parents_agree_with_the_chain() -> None:
    chain = KeyChain("n", 2)
    chain.extend(list(range(7)))
    assert len(chain) == 3
    assert chain.packed(1, 3) == b"".join(chain[1:3])
    assert [chain.parent(index) for index in range(3)] == [NO_PARENT, *chain[0:2]]
    assert root_key("n") not in list(chain)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_holds_at_least_one_token(size: int) -> None:
    with pytest.raises(ValueError, match="expected a positive number of tokens"):
        KeyChain("n", size)


def test_a_chain_grows_by_as_many_blocks_as_are_wanted() -> None:
    tokens = list(range(64))
    whole, stepwise = KeyChain("n", 4), KeyChain("n", 4)
    whole.extend(tokens)
    for blocks in (3, 3, 10, 40):
        assert stepwise.extend(tokens, (), blocks) == min(blocks, 16)
    assert list(stepwise) == list(whole)


@given(st.integers(1, 9), st.integers(1, 8), st.data())
def test_each_key_has_the_place_of_its_chunk(chunks: int, shards: int, data: st.DataObject) -> None:
    directories = [bytes([number]) * KEY_BYTES for number in range(chunks + 1)]
    first = data.draw(st.integers(0, chunks * shards))
    found = directories_of(b"".join(directories), chunks * shards, first)
    assert found == [directories[at // shards] for at in range(first, chunks * shards + 1)]
    assert directories_of(b"", chunks * shards, first) == []
