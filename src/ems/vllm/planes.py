"""How the KV state of one chunk of tokens is cut into pages, whoever computes it.

A *plane* is one kind of page: the layers of one KV cache group in one pipeline stage.  A chunk has ``shards``
pages in each plane, one for each group of KV heads, so that engines with different tensor-parallel sizes write and
read the same pages: each rank handles the shards of its own heads.  Heads that several ranks hold (MLA; fewer heads
than ranks) are stored once.  All functions are pure.
"""

from __future__ import annotations

import enum
import math

import msgspec

from ems.errors import ConfigError

FINEST = 8
"""Pages that a chunk is cut into where nothing asks for more; serves tensor-parallel sizes up to this."""


class TokenOrder(enum.Enum):
    """How the state that a block has of one KV head lies in memory.

    Where that is known, the bytes of a run of tokens do not depend on the engine's block size, so that engines with
    blocks of 32 and of 128 tokens share pages.
    """

    TOKENS = "tokens"
    """Token by token."""
    CPU_VECTOR = "cpu-vector"
    """VLLM's kernels for vector instructions: keys dimension by dimension, then values token by token."""
    CPU_AMX = "cpu-amx"
    """VLLM's kernels for AMX: keys in tiles of 32 tokens, then values, 16 dimensions after 16, in tiles of 2 tokens."""
    BLOCK = "block"
    """Known to the engine alone."""


class Plane(msgspec.Struct, frozen=True):
    """One kind of page of a model.

    ``group`` is the engine's KV cache group, whose block table says which engine block holds which tokens; ``stage``
    the pipeline stage that has the layers; ``shards`` the pages of one chunk; ``window`` how many tokens before a
    new one its layers look at, itself included (0: all of them); ``order`` how tokens lie in a block of the engine;
    ``parts`` how many of its own chunks make one of the model's, where groups have blocks of several sizes.

    With ``state`` its layers keep one state of all tokens so far (state-space models).  A page has the state behind the
    last token of its chunk, and a prompt goes on from the last one alone: a window of one token.
    """

    namespace: str
    group: int = 0
    stage: int = 0
    shards: int = 1
    window: int = 0
    order: TokenOrder = TokenOrder.TOKENS
    state: bool = False
    parts: int = 1

    def first_needed(self, tokens: int, size: int) -> int:
        """The first run of ``size`` tokens that must be loaded for the engine to go on behind ``tokens`` tokens."""
        return first_in_sight(self.window, tokens - self.state, size)


class Portion(msgspec.Struct, frozen=True):
    """What one rank handles: shards ``[first, first + count)``; of ``replicas`` ranks with these it is ``replica``."""

    first: int = 0
    count: int = 1
    replica: int = 0
    replicas: int = 1

    def stores(self, chunk: int) -> bool:
        """Whether this rank is the one that stores the request's chunk number ``chunk``: replicas take turns."""
        return chunk % self.replicas == self.replica


def shard_count(heads: int, ranks: int, wanted: int = 0) -> int:
    """Pages a chunk is cut into: ``wanted`` (``store_tp_size``), or as many as serve the usual tensor-parallel sizes.

    ``heads`` is the number of distinct KV heads, ``ranks`` the number of ranks that hold distinct ones.

    Raises ConfigError: ``wanted`` does not divide the heads, or is not a multiple of ``ranks``.
    """
    if not wanted:
        usual = math.gcd(heads, FINEST)
        return usual if usual % ranks == 0 else math.gcd(heads, ranks)
    if heads % wanted:
        raise ConfigError(f"store_tp_size is {wanted}, expected a divisor of the model's {heads} KV heads")
    if wanted % ranks:
        raise ConfigError(
            f"store_tp_size is {wanted}, but the engine spreads the KV heads over {ranks} ranks; "
            f"set store_tp_size to a multiple of {ranks}, the same in all engines that share the pool"
        )
    return wanted


def portion(heads: int, shards: int, ranks: int, rank: int) -> Portion:
    """The part of ``heads`` KV heads, cut into ``shards``, that ``rank`` of ``ranks`` tensor-parallel ranks handles.

    Ranks beyond the number of heads hold copies, neighbours the same ones.

    Raises ConfigError: the heads cannot be spread evenly over the ranks.
    """
    replicas = max(ranks // heads, 1)
    holders = ranks // replicas
    if holders * replicas != ranks or heads % holders or shards % holders:
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, expected a size that divides the model's {heads} KV heads or is a "
            "multiple of them"
        )
    count = shards // holders
    return Portion(rank // replicas * count, count, rank % replicas, replicas)


def first_in_sight(window: int, tokens: int, size: int) -> int:
    """The first run of ``size`` tokens (a block or a chunk) that a token computed after ``tokens`` others looks at."""
    if not window:
        return 0
    return max(tokens - window + 1, 0) // size
