"""Brings the pages of prompts up that are told of by their tokens, before an engine asks for them.

A brain.  What always holds: pages of one tenant are brought up for that tenant alone; for one prompt at most
:data:`~ems.pool.protocol.limits.MAX_KEYS` keys are made and asked for, of :data:`MOST_TOKENS` tokens, in all layouts
together; nothing is pinned, leased or waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ems.errors import PoolError
from ems.pool.keys import KEY_BYTES
from ems.pool.names import tenant_of
from ems.pool.prompts import described_plane
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.service.handling import STEP, some_at_a_time
from ems.pool.service.storing import Steps

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.tiers.manager import TierManager

MOST_TOKENS: Final = 1 << 23
"""Of a prompt in all layouts: the longest one in 64 of them, or about 0.3 seconds of work."""
STEP_TOKENS: Final = 1 << 15
"""Tokens of one step, unless a chunk has more."""


class Fetched(NamedTuple):
    """What a prompt came to: its pages in all layouts, and those of them in memory or on their way there."""

    pages: int = 0
    coming: int = 0


class PromptFetcher:
    """Knows the layouts that engines of this node described."""

    def __init__(self, core: PoolCore, below: TierManager) -> None:
        self._core = core
        self._below = below

    def fetch(self, tenant: str, model: str, tokens: Sequence[int]) -> Steps[Fetched]:
        """Fetch the full blocks of a prompt for ``model``, as requests call it, from the tiers below memory."""
        self._core.counters.prefetch_hints += 1
        pages = coming = 0
        left, tokens_left = MAX_KEYS, MOST_TOKENS
        for name, facts in list(self._core.reasons.layouts.all.items()):
            plane = described_plane(name, facts) if tenant_of(name) == tenant else None
            if plane is None or plane.serves not in ("", model):
                continue
            size = plane.chunk_tokens
            chunks = min(plane.full_chunks(min(len(tokens), tokens_left)), left // plane.shards)
            left, tokens_left = left - chunks * plane.shards, tokens_left - chunks * size
            step = min(STEP, max(STEP_TOKENS // size, 1))
            chain = plane.chain()
            while len(chain) < chunks:
                chain.extend(tokens, blocks=min(len(chain) + step, chunks))
                yield None
            keys = plane.keys(chain, plane.first_in_sight(chunks))
            pages += len(keys) // KEY_BYTES
            if keys:
                with contextlib.suppress(PoolError):  # the namespace is gone, or can have no memory here
                    coming += yield from self._prefetch(name, keys)
        return Fetched(pages, coming)

    def _prefetch(self, name: str, keys: bytes) -> Steps[int]:
        """Ask for pages of a namespace, which is opened when only a tier knows it."""
        number = self._core.find_namespace(name)
        if number < 0:
            page_size = self._below.page_size(name)
            if not page_size:
                return 0
            number = self._core.open_namespace(name, page_size)
        prefetch = partial(self._below.prefetch, number)
        return (yield from some_at_a_time(keys, 0, lambda some, start: prefetch(some) - start))
