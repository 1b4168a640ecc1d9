"""Registered engine memory and the namespace that follows from it.

A registration never changes; registering again makes a new one, and transfers on their way keep theirs.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from ems.cc_v1.cc_config import EmsConfig, KVCacheType
from ems.cc_v1.names import BlockNames
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.client.segments import SegmentMap
from ems.pool.facts import MODEL, TENANT, plain_facts
from ems.pool.keys import fingerprint, namespace_name

if TYPE_CHECKING:
    from ems.pool.layout import PageRef
    from ems.transfers.device import Device
    from ems.transfers.rows import TokenRows

PAGE_FORM = "cc-v1/1"
"""Changes whenever the meaning of a page's bytes does."""


def namespace_of(config: EmsConfig, rows: TokenRows) -> Namespace:
    """Where the pages of this rank live: equal for ranks that may read each other's pages, and for no others.

    Each rank of a TP group holds heads of its own, so their pages are kept apart; an MLA latent is the same on
    all of them whatever the size of the group, so it is stored once.
    """
    # The tenant is in the name itself, and whoever has the same name and model has the same tenant.
    name = namespace_name(config.tenant, _model(config), fingerprint(_facts(config, rows)))
    return Namespace(name, rows.page_bytes)


def description_of(config: EmsConfig, rows: TokenRows) -> dict[str, str]:
    return plain_facts({TENANT: config.tenant, MODEL: _model(config), **_facts(config, rows), "kind": "cc_v1"})


def _model(config: EmsConfig) -> str:
    return f"{config.cc_config_v1.model_id}+{config.cc_config_v1.llm_engine}"


def _facts(config: EmsConfig, rows: TokenRows) -> dict[str, object]:
    rank = config.cc_config_v1
    parts = [(part.dtype, part.heads, part.head_size) for part in rows.parts]
    facts: dict[str, object] = {
        "form": PAGE_FORM,
        "model": rank.model_id,
        "engine": rank.llm_engine,
        "kind": rank.kvcache_type.value,
        "block_size": rows.block_size,
        "layers": rows.layers,
        "tensors": parts,
        "pp": [rank.rank_in_pp_group, rank.pp_world_size],
    }
    if rank.kvcache_type is KVCacheType.MHA:
        facts["tp"] = [rank.rank_in_tp_group, rank.tp_world_size]
    return facts


class PageMemory:
    """The pool's memory as one connection sees it, known to the accelerator's driver while this object lives."""

    def __init__(self, segments: SegmentMap, device: Device, page_size: int) -> None:
        self._segments = segments
        self._device = device
        self._page_size = page_size
        self._pinned: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _unpin, device, self._pinned).atexit = False

    def segment(self, number: int) -> memoryview:
        """The whole segment, ready for copies.

        Raises:
            PoolError: it cannot be mapped, because the connection is gone.
        """
        with self._lock:
            if number not in self._pinned:
                mapped = self._segments.segment(number)
                self._device.pin(mapped)
                self._pinned[number] = mapped
            return self._pinned[number]

    def page(self, ref: PageRef) -> memoryview:
        return self.segment(ref.segment)[ref.offset : ref.offset + self._page_size]


def _unpin(device: Device, pinned: dict[int, memoryview]) -> None:
    for mapped in pinned.values():
        device.unpin(mapped)


class Registration:
    """One engine's caches: their rows, the device that copies them, the namespace of their pages."""

    def __init__(self, rows: TokenRows, device: Device, namespace: Namespace) -> None:
        self.rows = rows
        self.device = device
        self.namespace = namespace
        self.names = BlockNames(namespace.name)
        self._memory: tuple[int, PageMemory] | None = None
        self._lock = threading.Lock()

    def memory(self, client: PoolClient, epoch: int) -> PageMemory:
        """The pool's memory for pages that were promised on the connection ``epoch``.

        Raises:
            StaleReference: that connection is gone.
        """
        with self._lock:
            if self._memory is None or self._memory[0] != epoch:
                segments = client.segments(epoch)
                self._memory = (epoch, PageMemory(segments, self.device, self.namespace.page_size))
            return self._memory[1]

    def release_stale_memory(self, epoch: int) -> None:
        """Unpin memory of other connections than ``epoch``: a node that starts again may need it."""
        with self._lock:
            if self._memory is not None and self._memory[0] != epoch:
                self._memory = None
