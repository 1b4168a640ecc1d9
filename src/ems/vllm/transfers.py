"""Copies between engine blocks and pool pages, in threads beside the engine's compute.

Loads and saves each have a thread of their own.  What always holds: a loaded block is reported good only if
its page's header said the same before and after the copy; a page is committed only after all its bytes are
in place; a save stops before the engine gives its blocks to somebody else (:meth:`SaveJob.cancel`); every
job ends, whatever fails, and its end is reported exactly once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from logging import Logger

import msgspec

from ems.cc_v1.tensors import BlockRows, Device
from ems.errors import EmsError, StaleReference
from ems.pool.client import Namespace, PoolClient, Reservation, SegmentMap
from ems.pool.keys import KEY_BYTES
from ems.pool.layout import PageRef, unpack_refs
from ems.pool.room import Outcome
from ems.vllm.requests import Load, Save

COMPUTE_SECONDS = 600.0
"""How long a save waits for the forward pass that fills its blocks; over that the engine is taken for dead."""


NOTICE_SECONDS = 1.0
"""How often an idle worker looks whether its node is still there."""


class LoadResult(msgspec.Struct, frozen=True):
    """A load that ended: the blocks that hold nothing, and how long it took."""

    request_id: str
    failed_blocks: set[int]
    loaded: int
    seconds: float


class Loader:
    """Copies pages into engine blocks."""

    def __init__(
        self,
        client: PoolClient,
        namespace: Namespace,
        rows: BlockRows,
        device: Device,
        logger: Logger,
        call_timeout: float,
    ) -> None:
        self._call_timeout = call_timeout
        self._client = client
        self._namespace = namespace
        self._rows = rows
        self._device = device
        self._logger = logger
        self._inbox: queue.SimpleQueue[tuple[Load, object] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ems-load", daemon=True)
        self._thread.start()

    def start(self, load: Load, mark: object) -> None:
        """Queue a load, to begin once the engine's work up to ``mark`` is over: that may write into the same blocks."""
        self._inbox.put((load, mark))

    def results(self) -> list[LoadResult]:
        """Loads that ended since the last call; never waits."""
        ended = []
        while not self._results.empty():
            ended.append(self._results.get())
        return ended

    def close(self) -> None:
        """End the thread after the loads that are queued."""
        self._inbox.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            load, mark = job
            begin = time.perf_counter()
            loaded = 0
            try:
                loaded = self._load(load, mark)
            except EmsError as error:
                self._logger.warning("EMS load for request %s failed, it is computed: %s", load.request_id, error)
            except Exception:
                # Root of this thread: a defect here must cost a recompute, never the engine.
                self._logger.exception("EMS load for request %s failed, it is computed", load.request_id)
            failed = set(load.block_ids[loaded:])
            self._results.put(LoadResult(load.request_id, failed, loaded, time.perf_counter() - begin))

    def _next(self) -> tuple[Load, object] | None:
        while True:
            try:
                return self._inbox.get(timeout=NOTICE_SECONDS)
            except queue.Empty:
                self._notice()

    def _notice(self) -> None:
        try:
            self._client.notice()
        except Exception:
            # Root of this thread: see above.
            self._logger.exception("EMS could not look after its connection")

    def _load(self, load: Load, mark: object) -> int:
        """How many leading blocks were loaded."""
        self._client.connect(self._call_timeout)
        if self._client.node != load.node:
            # Slots of another node, or of the same one before it started again, are other memory.
            raise StaleReference("the pool node that promised the blocks is gone")
        segments = self._client.segments(self._client.epoch)
        keys = [load.keys[i : i + KEY_BYTES] for i in range(0, len(load.keys), KEY_BYTES)]
        jobs = list(zip(load.block_ids, keys, unpack_refs(load.packed_refs), strict=True))
        copied = 0
        self._device.wait_for(mark)
        try:
            for block, key, ref in jobs:
                if not segments.holds(ref, key):
                    break
                self._device.copy_in(self._rows, block, segments.page(ref, self._namespace.page_size))
                copied += 1
        finally:
            # Also when it fails: the blocks are computed then, and no copy may come after that.
            self._device.synchronise()
        for position, (_, key, ref) in enumerate(jobs[:copied]):
            if not segments.holds(ref, key):
                return position
        return copied


class SaveJob:
    """One save on its way: the blocks, how far it has come, whether it was called off."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self.reservation: Reservation | None = None
        self.again = False
        self.cancelled = False
        self._lock = threading.Lock()

    def cancel(self, device: Device) -> None:
        """Stop before the next page; when this returns no copy from the job's blocks is running."""
        with self._lock:
            self.cancelled = True
            device.synchronise()

    def copy(self, device: Device, rows: BlockRows, block: int, page: memoryview) -> bool:
        """Copy one block out, unless the job was called off."""
        with self._lock:
            if self.cancelled:
                return False
            device.copy_out(rows, block, page)
            return True


class SaveBatch:
    """The saves of one step: reserved while the step computes, copied once it has."""

    def __init__(self, saves: list[Save]) -> None:
        self.jobs = [SaveJob(save) for save in saves]
        self.mark: object = None
        self._computed = threading.Event()

    def call_off(self) -> None:
        """The engine stops before it computed the step: nothing of it is to be copied."""
        if not self._computed.is_set():
            for job in self.jobs:
                job.cancelled = True
            self._computed.set()

    def computed(self, mark: object) -> None:
        """The step's forward pass was launched up to ``mark``."""
        self.mark = mark
        self._computed.set()

    def wait(self) -> bool:
        """Wait for :meth:`computed`; False when the engine seems dead."""
        return self._computed.wait(COMPUTE_SECONDS)


class Saver:
    """Copies engine blocks into pages."""

    def __init__(
        self,
        client: PoolClient,
        namespace: Namespace,
        rows: BlockRows,
        device: Device,
        logger: Logger,
        call_timeout: float,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._rows = rows
        self._device = device
        self._logger = logger
        self._call_timeout = call_timeout
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._jobs: dict[str, list[SaveJob]] = {}
        self._failing = False
        self._latest: SaveBatch | None = None
        self._inbox: queue.SimpleQueue[SaveBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ems-save", daemon=True)
        self._thread.start()

    def start(self, saves: list[Save]) -> SaveBatch:
        """Queue the saves of one step, whose forward pass is about to begin."""
        batch = self._latest = SaveBatch(saves)
        with self._lock:
            for job in batch.jobs:
                self._open[job.save.request_id] += 1
                self._jobs.setdefault(job.save.request_id, []).append(job)
        self._inbox.put(batch)
        return batch

    def cancel(self, request_id: str) -> None:
        """The request's blocks go to others now: no copy from them runs once this returns."""
        with self._lock:
            jobs = list(self._jobs.get(request_id, ()))
        for job in jobs:
            job.cancel(self._device)

    def busy(self, request_id: str) -> bool:
        """Whether blocks of the request are still to be copied."""
        with self._lock:
            return self._open[request_id] > 0 and self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the saves that are queued and computed."""
        if self._latest is not None:
            self._latest.call_off()
        self._inbox.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (batch := self._inbox.get()) is not None:
            try:
                self._save(batch)
            except Exception:
                # Root of this thread: a defect here must cost later hits, never the engine.
                self._logger.exception("EMS save failed")
            finally:
                for job in batch.jobs:
                    self._close_job(job)

    def _save(self, batch: SaveBatch) -> None:
        for job in batch.jobs:
            self._guarded(self._reserve, job)
        if not batch.wait():
            self._logger.warning("EMS gave up saving: the engine did not compute for %.0f s", COMPUTE_SECONDS)
            batch.call_off()
        else:
            self._device.wait_for(batch.mark)
        for job in batch.jobs:
            self._guarded(self._store, job)
            self._close_job(job)

    def _guarded(self, step: object, job: SaveJob) -> None:
        assert callable(step)
        try:
            step(job)
        except EmsError as error:
            job.reservation = None
            if not self._failing:
                self._failing = True
                self._logger.warning("EMS cannot store blocks, serving on without it: %s", error)
        except Exception:
            # Root of this thread: a defect here must cost a later hit, never the engine.
            job.reservation = None
            self._logger.exception("EMS save for request %s failed", job.save.request_id)

    def _reserve(self, job: SaveJob) -> None:
        save = job.save
        reserved = self._client.reserve(self._namespace, save.parent, save.keys, self._call_timeout, save.tail)
        if self._failing:
            self._failing = False
            self._logger.info("EMS stores blocks again")
        if reserved.granted:
            job.reservation = reserved
        # Memory of a node that has just started is still being touched; it may be by the time the step is over.
        job.again = not reserved.granted and Outcome.NOT_TOUCHED in reserved.outcomes

    def _store(self, job: SaveJob) -> None:
        if job.again and not job.cancelled:
            self._reserve(job)
        reserved = job.reservation
        if reserved is None:
            return
        try:
            segments = self._client.segments(reserved.epoch)
            written = self._copy(job, reserved, segments)
        except BaseException:
            self._give_back(reserved)
            raise
        self._close_job(job)
        if written:
            self._client.commit(reserved, written, self._call_timeout)
        if len(written) < len(reserved.granted):
            self._give_back(reserved)

    def _copy(self, job: SaveJob, reserved: Reservation, segments: SegmentMap) -> list[int]:
        written: list[int] = []
        for position, ref in reserved.granted.items():
            if self._client.epoch != reserved.epoch:
                raise StaleReference("the connection to the pool was lost while blocks were copied")
            if not job.copy(self._device, self._rows, job.save.block_ids[position], self._page(segments, ref)):
                break
            written.append(position)
        self._device.synchronise()
        return written

    def _page(self, segments: SegmentMap, ref: PageRef) -> memoryview:
        return segments.page(ref, self._namespace.page_size)

    def _give_back(self, reserved: Reservation) -> None:
        try:
            self._client.abort(reserved, self._call_timeout)
        except EmsError:
            # The connection is gone, and with it the reservation.
            return

    def _close_job(self, job: SaveJob) -> None:
        """The job reads its blocks no more; harmless when repeated."""
        request_id = job.save.request_id
        with self._lock:
            jobs = self._jobs.get(request_id)
            if jobs is None or job not in jobs:
                return
            jobs.remove(job)
            self._open[request_id] -= 1
            if not jobs:
                del self._jobs[request_id]
                del self._open[request_id]
