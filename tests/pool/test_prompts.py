"""What engines say of their layouts, and what is made of it."""

from __future__ import annotations

import pytest

from ems.pool.keys import KeyChain, page_keys
from ems.pool.prompts import MOST_CHUNK_TOKENS, MOST_SHARDS, described_plane

NAME = "//acme/default/model/01/0.0"
FACTS = {"kind": "vllm", "tenant": "acme", "model": "model", "chunk_tokens": "4", "page_shards": "2", "window": "0"}


def test_the_keys_of_a_prompt_are_those_that_the_engine_makes() -> None:
    plane = described_plane(NAME, FACTS)
    assert plane is not None
    chain = plane.chain()
    assert chain.extend(range(11)) == 2
    own = KeyChain("default/model/01", 4)
    own.extend(range(11))
    assert plane.keys(chain) == page_keys(own.packed(0, 2), 2)
    assert plane.keys(chain, 1) == page_keys(own.packed(1, 2), 2)


@pytest.mark.parametrize(
    ("window", "chunks", "first"), [("0", 9, 0), ("1", 9, 8), ("4", 9, 8), ("5", 9, 7), ("100", 9, 0), ("3", 0, 0)]
)
def test_of_a_window_only_what_is_in_sight_is_needed(window: str, chunks: int, first: int) -> None:
    plane = described_plane(NAME, FACTS | {"window": window})
    assert plane is not None
    assert plane.first_in_sight(chunks) == first


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "sdk"},
        {"chunk_tokens": "0"},
        {"chunk_tokens": str(MOST_CHUNK_TOKENS + 1)},
        {"page_shards": "0"},
        {"page_shards": str(MOST_SHARDS + 1)},
        {"window": "-1"},
        {"window": "all"},
        {"chunk_tokens": "9" * 5000},
    ],
)
def test_what_makes_no_sense_is_not_believed(said: dict[str, str]) -> None:
    assert described_plane(NAME, FACTS | said) is None
    assert described_plane(NAME, {name: FACTS[name] for name in FACTS if name not in said}) is None
