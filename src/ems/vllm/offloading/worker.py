"""The worker's side: carries vLLM's transfers to the loads and saves of this rank, as ``EmsStoreConnector`` makes them.

What always holds: every transfer ends and is reported once, as done, because vLLM knows no other end; which loads
failed is told beside, so vLLM computes their requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import Tail
from ems.transfers.device import DevicePair
from ems.vllm.loads import Loader
from ems.vllm.pages import PlaneRows
from ems.vllm.requests import Load, LoadPart, Pages, Save
from ems.vllm.saves import Saver

logger = init_logger("vllm.ems.offloading")

FLUSH_SECONDS = 0.02
"""How long one step waits for stores out of blocks that it gives to others; then they are called off."""


class ChunkRun(NamedTuple):
    """Consecutive chunks of a request from number ``first`` on, behind the one of the key ``parent``, in ``groups``."""

    first: int
    parent: bytes
    tails: Sequence[Tail]
    groups: tuple[int, ...]


@dataclass(slots=True)
class PagesToStore(LoadStoreSpec):
    """Runs of chunks; in each group they come in the order of its blocks."""

    runs: list[ChunkRun]


@dataclass(slots=True)
class PagesToLoad(LoadStoreSpec):
    """For each of the groups that vLLM offloads, pages that lie on the node ``node``, in the order of its blocks."""

    node: str
    groups: list[list[Pages]]


@dataclass
class _Store:
    """A store job: when it began, the numbers of its saves that may still read blocks, bytes stored until now."""

    begun: float
    saves: set[int]
    bytes: int = 0


class EmsOffloadingWorker(OffloadingWorker):
    """Transfers of one rank, which has ``planes`` of the offloaded ``groups``; a page has ``page_blocks`` blocks."""

    def __init__(
        self,
        client: PoolClient,
        devices: DevicePair,
        planes: Sequence[PlaneRows],
        groups: Sequence[int],
        page_blocks: int,
        call_timeout: float,
    ) -> None:
        self._client = client
        self._devices = devices
        self._groups = groups
        self._page_blocks = page_blocks
        self._local = {plane.local.number for plane in planes}
        self._loader = Loader(client, planes, devices.load, logger, call_timeout)
        self._saver = Saver(client, planes, devices.save, logger, call_timeout)
        self._stores: dict[int, _Store] = {}
        """Those under way, by vLLM's number of the job."""
        self._save_numbers = count(1)
        self._failed: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, PagesToStore)
        saves = self._saves(str(job_id), self._by_group(src_spec), dst_spec)
        self._stores[job_id] = _Store(time.monotonic(), {save.number for save in saves})
        batch = self._saver.start(saves)
        # vLLM submits stores behind the step that computes their blocks.
        batch.progress.finish(self._devices.save.mark())
        return True

    def _by_group(self, blocks: GPULoadStoreSpec) -> dict[int, list[int]]:
        """The engine's blocks of a transfer, by the number of their group."""
        ids, at, found = blocks.block_ids.tolist(), 0, {}
        for group, size in zip(self._groups, blocks.group_sizes, strict=True):
            found[group] = ids[at : at + size]
            at += size
        return found

    def _saves(self, name: str, blocks: dict[int, list[int]], pages: PagesToStore) -> list[Save]:
        saves, taken = [], Counter[int]()
        for run in pages.runs:
            size = len(run.tails) * self._page_blocks
            ids: list[list[int]] = [[] for _ in range(max(blocks) + 1)]
            for group in run.groups:
                ids[group] = blocks[group][taken[group] : taken[group] + size]
                taken[group] += size
            saves.append(Save(next(self._save_numbers), name, run.first, run.parent, run.tails, ids))
        return saves

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, PagesToLoad)
        blocks, parts = self._by_group(dst_spec), []
        for group, index, planes in zip(self._groups, dst_spec.block_indices, src_spec.groups, strict=True):
            ids = blocks[group]
            parts += [
                LoadPart(pages.plane, ids, pages.keys, pages.packed_refs, index % self._page_blocks)
                for pages in planes
                if ids and pages.plane in self._local
            ]
        self._loader.start(Load(str(job_id), src_spec.node, parts), self._devices.load.mark())
        return True

    def get_finished(self) -> list[TransferResult]:
        for saved in self._saver.results():
            store = self._stores.get(int(saved.request_id))
            if store is not None:  # a job may be over, for its blocks are free, before its pages are committed
                store.bytes += saved.bytes
        over = set(self._saver.take_over())
        results = []
        for job_id, store in list(self._stores.items()):
            store.saves -= over
            if not store.saves:
                del self._stores[job_id]
                results.append(TransferResult(job_id, True, store.bytes, time.monotonic() - store.begun))
        for loaded in self._loader.results():
            job_id = int(loaded.request_id)
            if not loaded.sound:
                self._failed.add(job_id)
            results.append(TransferResult(job_id, True, loaded.bytes, loaded.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """These blocks are about to be others': what is not stored in a moment is called off."""
        stores = filter(None, map(self._stores.get, job_ids))
        self._saver.finish(FLUSH_SECONDS, {number for store in stores for number in store.saves})

    def take_failed_loads(self) -> set[int]:
        """Jobs that the last :meth:`get_finished` reported and whose blocks hold nothing."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        self._saver.finish(0.0)
        self._saver.close()
        self._loader.close()
        self._client.close()
