"""What the blocks of an engine's caches are called in the pool: their namespace, and their keys in it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ems.cc_v1.cc_config import EmsConfig, KVCacheType
from ems.pool.client.answers import Namespace
from ems.pool.keys import NO_PARENT, BlockKey, fingerprint, integer_key, namespace_name
from ems.pool.names import MODEL, TENANT, plain_facts

if TYPE_CHECKING:  # this needs torch
    from ems.transfers.rows import TokenRows

PAGE_FORM = "cc-v1/1"
"""Changes whenever the meaning of a page's bytes does."""
REMEMBERED = 1 << 16
"""How many blocks' keys are kept, and of how many at least the block before is remembered."""


def namespace_of(config: EmsConfig, rows: TokenRows) -> tuple[Namespace, dict[str, str]]:
    """Where the pages of this rank live, and what that name means.

    It is equal for ranks that may read each other's pages, and for no others.  Each rank of a TP group holds heads of
    its own, so their pages are kept apart; an MLA latent is the same on all of them whatever the size of the group, so
    it is stored once.
    """
    rank = config.cc_config_v1
    facts: dict[str, object] = {
        "form": PAGE_FORM,
        "model": rank.model_id,
        "engine": rank.llm_engine,
        "kind": rank.kvcache_type.value,
        "block_size": rows.block_size,
        "layers": rows.layers,
        "tensors": [(part.dtype, part.heads, part.head_size) for part in rows.parts],
        "pp": [rank.rank_in_pp_group, rank.pp_world_size],
    }
    if rank.kvcache_type is KVCacheType.MHA:
        facts["tp"] = [rank.rank_in_tp_group, rank.tp_world_size]
    model = f"{rank.model_id}+{rank.llm_engine}"
    # The tenant is in the name itself, and whoever has the same name and model has the same tenant.
    name = namespace_name(config.tenant, model, fingerprint(facts))
    described = plain_facts({TENANT: config.tenant, MODEL: model, **facts, "kind": "cc_v1"})
    return Namespace(name, rows.page_bytes), described


class BlockNames:
    """The keys in one namespace of blocks that a caller names by integers.  Safe for several threads.

    A hash names a block together with its whole prefix, but not how many of its tokens are there.  So that a page
    never claims more than it holds, a whole block and the beginning of one have different keys; of the beginnings
    the pool keeps one a hash, and the page itself says how many tokens it has.
    """

    def __init__(self, namespace: str) -> None:
        self.whole = lru_cache(REMEMBERED)(partial(integer_key, namespace=namespace))
        """The key of a block with all of its tokens."""
        self.beginning = lru_cache(REMEMBERED // 16)(partial(integer_key, namespace=f"{namespace}/beginning"))
        """The key of a block that has only its first tokens."""
        self._lock = threading.Lock()
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def key(self, value: int, *, whole: bool) -> BlockKey:
        return self.whole(value) if whole else self.beginning(value)

    def remember(self, hashes: Sequence[int]) -> None:
        """``hashes`` are consecutive blocks: each comes before the next one."""
        with self._lock:
            self._young.update(zip(hashes[1:], hashes, strict=False))
            if len(self._young) > REMEMBERED:
                self._old, self._young = self._young, {}

    def before(self, value: int) -> BlockKey:
        """The key of the block before ``value``, as far as it is remembered.

        It only tells the pool what hangs on what: where it is not known, eviction is less exact, no more.
        """
        with self._lock:
            parent = self._young.get(value, self._old.get(value))
        return NO_PARENT if parent is None else self.whole(parent)
