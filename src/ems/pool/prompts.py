"""The pages of a prompt of token ids, by what engines told of their layouts, so that no engine has to be asked.

Adapters, images and cache salts are in the keys and not in the tokens: pages of such prompts are not found here.

What always holds: what is described by a client is not believed beyond the bounds here, whatever it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ems.pool.keys import KeyChain, page_keys
from ems.pool.names import own_name

SERVES: Final = "serves"
"""The fact of an engine with adapters that says under which name it serves the model without any of them."""
CHAIN: Final = "chain"
"""The fact of an engine with a weights version that says where chains begin, behind the name of model and layout."""
MOST_CHUNK_TOKENS: Final = 1 << 20
MOST_SHARDS: Final = 1024


class DescribedPlane(msgspec.Struct, frozen=True):
    """One namespace that an engine described: where its chains begin, how its chunks are cut."""

    namespace: str
    identity: str
    """The name of model and layout, to all planes the same."""
    chain_name: str
    """Where its chains of keys begin."""
    chunk_tokens: int
    shards: int
    window: int
    serves: str = ""
    """The only name in requests that means this; empty where all do."""

    def chain(self) -> KeyChain:
        return KeyChain(self.chain_name, self.chunk_tokens)

    def keys(self, chain: KeyChain, first: int = 0) -> bytes:
        """The keys of all pages of the chunks of ``chain`` from ``first`` on."""
        return page_keys(chain.packed(first, len(chain)), self.shards)

    def full_chunks(self, tokens: int) -> int:
        """How many full chunks of a prompt of so many tokens an engine may go on behind.

        It computes the last token again, so that a state (a window of one token) that has it is of no use.
        """
        return max(tokens - (self.window == 1), 0) // self.chunk_tokens

    def first_in_sight(self, chunks: int) -> int:
        """The first of so many chunks that is needed to go on behind the last one."""
        return max(chunks * self.chunk_tokens - self.window, 0) // self.chunk_tokens if self.window else 0


def described_plane(namespace: str, facts: Mapping[str, str]) -> DescribedPlane | None:
    """What ``facts`` say of ``namespace``; None where its keys do not come from tokens, or nothing sensible is said."""
    if facts.get("kind") != "vllm":
        return None
    try:
        chunk, shards, window = (int(facts[name]) for name in ("chunk_tokens", "page_shards", "window"))
    except (KeyError, ValueError):
        return None
    if not (0 < chunk <= MOST_CHUNK_TOKENS and 0 < shards <= MOST_SHARDS and window >= 0):
        return None
    identity = own_name(namespace).rpartition("/")[0]
    chain_name = f"{identity}/{facts[CHAIN]}" if facts.get(CHAIN) else identity
    return DescribedPlane(namespace, identity, chain_name, chunk, shards, window, facts.get(SERVES, ""))
