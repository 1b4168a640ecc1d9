"""The worker's side: copies chunks between engine blocks and the pool's pages, in one thread for each direction.

vLLM's own worker copies to and from one tensor of rows of one size; here a chunk lies wherever the pool has room, so
that plans are made here and vLLM's call for many copies carries them out (:mod:`ems.transfers.device`).

What always holds: every job ends and is reported once, as done, because vLLM knows no other end; which loads failed is
told beside, so vLLM computes their requests; a page is committed only when all its
bytes are in place, and loaded only where its header said the same before and after the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from ems.errors import EmsError, PoolTimeout, StaleReference
from ems.pool.checksum import page_checksum
from ems.pool.client.answers import Namespace, Reservation
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, cut
from ems.pool.layout import unpack_refs
from ems.pool.segments.reader import PageReader
from ems.transfers.device import Device, DevicePair
from ems.transfers.lane import Lane
from ems.transfers.plan import CopyPlan
from ems.transfers.rows import BlockRows, PageBlocks
from ems.vllm.offloading.chunks import TRAILER_BYTES, ChunkBlocks, chunks_of, trailer, valid_from
from ems.vllm.offloading.transfer import PagesToLoad, PagesToStore

logger = init_logger("vllm.ems.offloading")


FLUSH_SECONDS = 0.02
"""How long one step waits for stores out of blocks that it gives to others; then they are called off."""
AWAY_SECONDS = 5.0
"""How long nothing is asked of a node that did not answer."""


class _Job:
    """A transfer, which is called off by who must have its blocks back."""

    def __init__(self, number: int, blocks: GPULoadStoreSpec, pages: LoadStoreSpec, device: Device) -> None:
        self.number = number
        self.device = device
        self.mark = device.mark()
        """What the engine may still be writing into the blocks, or out of them, comes before the copies."""
        self.blocks = blocks
        self.pages = pages
        self.begun = time.monotonic()
        self.copied = threading.Event()
        """Its blocks are read no more."""
        self._called_off = threading.Event()
        self._copying = threading.Lock()

    def call_off(self) -> None:
        """Returns when no copy runs any more, and none will."""
        with self._copying:
            self._called_off.set()
            self.device.synchronise()

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Blocks may be read inside, if the value is true."""
        with self._copying:
            yield not self._called_off.is_set()

    def by_group(self, groups: Sequence[BlockRows]) -> list[list[ChunkBlocks]]:
        ids, at, found = self.blocks.block_ids.tolist(), 0, []
        for rows, size, index in zip(groups, self.blocks.group_sizes, self.blocks.block_indices, strict=True):
            found.append(chunks_of(ids[at : at + size], index, rows.page_blocks))
            at += size
        return found


class _Ended(NamedTuple):
    """The end of a job: bytes that were moved, seconds, and whether it is a load whose blocks hold nothing."""

    number: int
    size: int
    seconds: float
    failed: bool


def group_rows(caches: CanonicalKVCaches, page_blocks: int) -> list[BlockRows]:
    """What each group has in the engine; its pages are of ``page_blocks`` blocks."""
    blocks = [one.tensor.view(torch.int8).view(one.tensor.shape[0], 1, -1) for one in caches.tensors]
    return [
        BlockRows([blocks[ref.tensor_idx][:, :, : ref.page_size_bytes] for ref in refs], page_blocks=page_blocks)
        for refs in caches.group_data_refs
    ]


class EmsOffloadingWorker(OffloadingWorker):
    """Transfers of rank ``rank``, whose groups have ``groups`` in the engine and ``namespaces`` in the pool."""

    def __init__(
        self,
        client: PoolClient,
        devices: DevicePair,
        rank: int,
        groups: Sequence[BlockRows],
        namespaces: Sequence[Namespace],
        call_timeout: float,
    ) -> None:
        self._client = client
        self._rank = rank
        self._groups = groups
        self._devices = devices
        self._namespaces = namespaces
        self._timeout = call_timeout
        self._stores: dict[int, _Job] = {}
        self._failed: set[int] = set()
        self._failing = False
        self._away_until = 0.0
        self._store_lane: Lane[_Job, _Ended] = Lane("ems-offloading-store", lambda: self._run(self._store_lane))
        self._load_lane: Lane[_Job, _Ended] = Lane("ems-offloading-load", lambda: self._run(self._load_lane))
        self._store_lane.start()
        self._load_lane.start()

    # Hooks

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        job = self._stores[job_id] = _Job(job_id, src_spec, dst_spec, self._devices.save)
        self._store_lane.put(job)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._load_lane.put(_Job(job_id, dst_spec, src_spec, self._devices.load))
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for ended in (*self._store_lane.results(), *self._load_lane.results()):
            self._stores.pop(ended.number, None)
            if ended.failed:
                self._failed.add(ended.number)
            results.append(TransferResult(ended.number, True, ended.size, ended.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """These blocks are about to be others': what is not stored in a moment is called off."""
        until = time.monotonic() + FLUSH_SECONDS
        for job_id in job_ids:
            job = self._stores.get(job_id)
            if job is not None and not job.copied.wait(max(until - time.monotonic(), 0)):
                job.call_off()

    def take_failed_loads(self) -> set[int]:
        """Jobs that the last :meth:`get_finished` reported and whose blocks hold nothing."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        for job in list(self._stores.values()):
            job.call_off()
        self._store_lane.close()
        self._load_lane.close()
        self._client.close()

    # Threads

    def _run(self, lane: Lane[_Job, _Ended]) -> None:
        move: Callable[[_Job], int] = self._store if lane is self._store_lane else self._load
        while (job := lane.next()) is not None:
            size, failed = 0, False
            try:
                self._refuse_away()
                size = move(job)
                self._failing = False
            except EmsError as error:
                failed = True
                if not self._failing:
                    logger.warning("EMS cannot move chunks, serving on without it: %s", error)
                self._failing = True
                if isinstance(error, PoolTimeout) and time.monotonic() >= self._away_until:
                    self._away_until = time.monotonic() + AWAY_SECONDS
            except Exception:  # the root of what this thread does, see below
                # Root of this thread: a defect here must cost a recompute, never the engine.
                failed = True
                logger.exception("EMS transfer failed")
            job.copied.set()
            failed = failed and lane is self._load_lane
            lane.ended(_Ended(job.number, size, time.monotonic() - job.begun, failed))

    def _refuse_away(self) -> None:
        if time.monotonic() < self._away_until:
            raise PoolTimeout("the pool node did not answer a moment ago")

    # Stores

    def _store(self, job: _Job) -> int:
        assert isinstance(job.pages, PagesToStore)
        size = 0
        for place, chunks in enumerate(job.by_group(self._groups)):
            keys, parents = cut(job.pages.keys[place], KEY_BYTES), cut(job.pages.parents[place], KEY_BYTES)
            for begin, end in _runs(keys, parents):
                size += self._store_run(job, place, chunks[begin:end], parents[begin], keys[begin:end])
        return size

    def _store_run(
        self, job: _Job, place: int, chunks: Sequence[ChunkBlocks], parent: bytes, keys: Sequence[bytes]
    ) -> int:
        """Store consecutive chunks; bytes that were."""
        namespace, rows = self._namespaces[place], self._groups[place]
        reserved = self._client.reserve(namespace, parent, keys, self._timeout)
        written: dict[int, int] = {}
        try:
            segments = self._client.segments(reserved.epoch)
            # A chunk whose last blocks are missing could be loaded by nobody.
            whole = [at for at in reserved.granted if chunks[at].first + len(chunks[at].block_ids) == rows.page_blocks]
            job.device.wait_for(job.mark)
            for batch in self._batches(whole, namespace):
                if self._client.epoch != reserved.epoch:
                    raise StaleReference("the connection to the pool was lost while chunks were copied")
                pages = {at: segments.page(reserved.granted[at], namespace.page_size) for at in batch}
                plan = self._plan(place, [chunks[at] for at in batch], list(pages.values()), out=True)
                with job.copying() as allowed:
                    if not allowed:
                        break
                    job.device.copy(plan)
                    job.device.synchronise()
                for at, page in pages.items():
                    page[rows.page_bytes :] = trailer(chunks[at].first)
                    written[at] = page_checksum(page)
            if written:
                self._client.commit(reserved, list(written), self._timeout, list(written.values()))
        finally:
            if len(written) < len(reserved.granted):
                self._give_back(reserved)
        return len(written) * namespace.page_size

    def _give_back(self, reserved: Reservation) -> None:
        try:
            self._client.abort(reserved, self._timeout)
        except EmsError:
            return  # the connection is gone, and the reservation with it

    # Loads

    def _load(self, job: _Job) -> int:
        pages = job.pages
        assert isinstance(pages, PagesToLoad)
        if self._client.node != pages.node:
            self._client.notice()
            self._client.connect(self._timeout)
        if self._client.node != pages.node:
            raise StaleReference("the pool node that promised the chunks is gone")
        epoch, size = self._client.epoch, 0
        for place, chunks in enumerate(job.by_group(self._groups)):
            namespace = self._namespaces[place]
            reader = self._client.reader(namespace, epoch)
            keys, refs = cut(pages.keys[place], KEY_BYTES), unpack_refs(pages.refs[self._rank][place])
            try:
                job.device.wait_for(job.mark)
                for batch in self._batches(range(len(chunks)), namespace):
                    places = [reader.page(refs[at]) for at in batch]
                    for at, page in zip(batch, places, strict=True):
                        if not reader.holds(refs[at], keys[at]) or valid_from(page) > chunks[at].first:
                            raise StaleReference("a chunk is not in the pool any more")
                    job.device.copy(self._plan(place, [chunks[at] for at in batch], places, out=False))
                job.device.synchronise()
                if not all(map(reader.sound, refs, keys)):
                    raise StaleReference("a chunk changed while it was loaded, or its bytes are not right")
                size += len(chunks) * namespace.page_size
            finally:
                # Also when it failed: the blocks are computed then, and no copy may come after that.
                job.device.synchronise()
                self._report(namespace, reader)
        return size

    def _batches(self, chunks: Sequence[int], namespace: Namespace) -> Iterator[Sequence[int]]:
        step = max(self._devices.save.batch_bytes // namespace.page_size, 1)
        for begin in range(0, len(chunks), step):
            yield chunks[begin : begin + step]

    def _plan(self, place: int, chunks: Sequence[ChunkBlocks], pages: Sequence[memoryview], *, out: bool) -> CopyPlan:
        """Copies between the blocks of each chunk and its page."""
        parts = [PageBlocks(chunk.block_ids, first=chunk.first) for chunk in chunks]
        return self._groups[place].plan(parts, pages, out=out)

    def _report(self, namespace: Namespace, reader: PageReader) -> None:
        if reader.corrupt:
            logger.warning("EMS found %d chunks that are not right, they are computed", len(reader.corrupt))
            try:
                self._client.report(namespace, reader, self._timeout)
            except EmsError as error:
                logger.warning("EMS could not report them: %s", error)


def _runs(keys: Sequence[bytes], parents: Sequence[bytes]) -> list[tuple[int, int]]:
    """Where runs of chunks begin and end, each of which continues the one before it."""
    starts = [at for at in range(len(keys)) if not at or parents[at] != keys[at - 1]]
    return list(pairwise([*starts, len(keys)]))


def page_sizes_of(groups: Sequence[BlockRows]) -> list[int]:
    """Bytes of the pages of each group."""
    return [rows.page_bytes + TRAILER_BYTES for rows in groups]
