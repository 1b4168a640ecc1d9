"""Copies engine blocks into pool pages, in a thread beside the engine's compute.

What always holds: a page is committed only after all its bytes are in place; every save ends, whatever fails, and says
once when it reads its blocks no more, which the scheduler side holds until then.  A pool that does not answer keeps no
large share of the engine's blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from logging import Logger

import msgspec
import numpy as np

from ems.errors import EmsError, StaleReference
from ems.pool.client.answers import Reservation
from ems.pool.client.pool_client import PoolClient
from ems.pool.layout import crc32c
from ems.pool.pages import STORED, Outcome
from ems.transfers.checksums import PageSums
from ems.transfers.device import Device
from ems.transfers.lane import Lane
from ems.transfers.plan import ALL, CopyPlan, Slots
from ems.vllm.layers import LayerOrder, Progress
from ems.vllm.pages import PlaneRows, StoredPage
from ems.vllm.requests import Save

COMPUTE_SECONDS = 600.0
"""How long a save waits for the forward pass that fills its blocks; over that the engine is taken for dead."""
OUTPUT_SECONDS = 0.02
"""How long a save that takes the processor itself waits at most until the engine goes on to its next step."""
SILENT_SECONDS = 0.5
"""How long the pool may leave a call unanswered before saves that hold many blocks end without it."""
HELD_SHARE = 8
"""Saves hold many blocks when they hold more than one in so many."""
MAX_UNSTORED = 1024
"""Saves without room that are remembered, for those that follow them."""


class SaveResult(msgspec.Struct, frozen=True):
    """What a save stored, and the time for the copy; or ``error``, the class of what made it fail.

    ``blocks`` are whole blocks of the request, 0 where others stand for them.
    """

    request_id: str
    bytes: int = 0
    seconds: float = 0.0
    blocks: int = 0
    error: str = ""


class SaveJob:
    """One save in one plane: how far its pages have come, whether they were called off."""

    def __init__(self, save: Save, plane: PlaneRows) -> None:
        self.save = save
        self.plane = plane
        self.pages: list[StoredPage] = []
        self.checksums: dict[int, int] = {}
        self.reservation: Reservation | None = None
        self.again = False
        self.cancelled = False
        self.mixed = False
        """Whether the engine may have cleared blocks while they were read."""
        self.closed = threading.Event()
        self.seconds = 0.0
        self._lock = threading.Lock()

    @property
    def copies(self) -> bool:
        """Whether anything of it may still be to be copied."""
        return not self.cancelled and (self.reservation is not None or self.again)

    def cancel(self, device: Device) -> None:
        """Stop before the next copies; when this returns no copy from the job's blocks is running."""
        with self._lock:
            self.cancelled = True
            device.synchronise()

    def copy(self, device: Device, plan: CopyPlan, sums: PageSums) -> bool:
        """Copy some of its pages out, unless it was called off."""
        with self._lock:
            if not self.cancelled:
                device.copy(plan, sums)
            return not self.cancelled


class SaveBatch:
    """The saves of one step: reserved while the step computes, copied once it has, or layer by layer meanwhile."""

    def __init__(self, jobs: list[SaveJob], *, by_layer: bool, after_output: bool = False) -> None:
        self.jobs = jobs
        self.by_layer = by_layer
        self.progress = Progress()
        self.next_step = threading.Event()
        """Whether the engine has gone on to another step, so that nobody waits for the output of this one.  Always so
        where the batch is not to come ``after_output``."""
        if not after_output:
            self.next_step.set()

    def call_off(self) -> None:
        """The engine stops before it computed the step: nothing of it is to be copied."""
        self.next_step.set()
        if not self.progress.over:
            for job in self.jobs:
                job.cancelled = True
            self.progress.finish()


class Saver:
    """Saves of one rank, whose planes are ``planes``."""

    def __init__(
        self,
        client: PoolClient,
        planes: Sequence[PlaneRows],
        device: Device,
        logger: Logger,
        call_timeout: float,
        *,
        by_layer: bool = False,
        engine_blocks: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._planes = planes
        self._order = LayerOrder(planes)
        self._by_layer = by_layer
        self._device = device
        self._logger = logger
        self._call_timeout = call_timeout
        self._engine_blocks = engine_blocks
        self._clock = clock
        self._asked: float | None = None
        """Since when the pool has not answered the call that is under way."""
        self._lock = threading.Lock()
        self._open: dict[int, list[SaveJob]] = {}
        """Jobs that may still read blocks, by the number of their save."""
        self._over: list[int] = []
        self._failing = False
        self._unstored: dict[tuple[str, bytes], None] = {}
        """Last pages of saves for which there was no room, by namespace and key."""
        self._latest: SaveBatch | None = None
        self._lane: Lane[SaveBatch, SaveResult] = Lane("ems-save", self._run)
        self._lane.start()

    def start(self, saves: Sequence[Save], *, after_output: bool = False) -> SaveBatch:
        """Store ``saves`` of one step; those ``after_output`` take the processor from :meth:`step_begins` on."""
        jobs = [SaveJob(save, plane) for save in saves for plane in self._planes]
        after_output = after_output and self._device.at_once and not self._by_layer
        batch = self._latest = SaveBatch(jobs, by_layer=self._by_layer, after_output=after_output)
        with self._lock:
            for job in jobs:
                self._open.setdefault(job.save.number, []).append(job)
        self._lane.put(batch)
        return batch

    def step_begins(self) -> None:
        """The engine has gone on to another step: saves of the one before may take the processor.

        Where steps are launched one by one the output of that one has left by then.
        """
        if self._latest is not None:
            self._latest.next_step.set()

    @property
    def news(self) -> bool:
        return self._lane.news or self._pool_holds_up

    @property
    def _pool_holds_up(self) -> bool:
        """Whether the pool does not answer while saves hold blocks that the engine may need."""
        asked = self._asked
        if asked is None or self._clock() - asked < SILENT_SECONDS:
            return False
        with self._lock:
            saves = [jobs[0].save for jobs in self._open.values()]
        held = sum(block > 0 for save in saves for group in save.block_ids for block in group)
        return HELD_SHARE * held > self._engine_blocks

    def results(self) -> list[SaveResult]:
        """What was stored since the last call; never waits."""
        return self._lane.results()

    def take_over(self) -> list[int]:
        """Numbers of saves that since the last call came to read their blocks no more."""
        if self._pool_holds_up:
            with self._lock:
                jobs = list(chain.from_iterable(self._open.values()))
            for job in jobs:
                job.cancel(self._device)
                self._close_job(job)
        with self._lock:
            over, self._over = self._over, []
        return over

    def finish(self, seconds: float, numbers: Container[int] | None = None) -> None:
        """All saves (of some ``numbers``) end within ``seconds``, or are called off; no copy of theirs runs after that.

        A copy that has begun is waited for: one step of :attr:`Device.step_bytes` for each plane.
        """
        with self._lock:
            jobs = [job for number, jobs in self._open.items() if numbers is None or number in numbers for job in jobs]
        deadline = time.monotonic() + seconds
        self.step_begins()
        for job in jobs:
            if not job.closed.wait(max(deadline - time.monotonic(), 0)):
                job.cancel(self._device)

    def call_off(self) -> None:
        """No save reads blocks any more, and none commits what it read: the engine may have begun to clear them."""
        self.step_begins()
        with self._lock:
            jobs = list(chain.from_iterable(self._open.values()))
        for job in jobs:
            job.mixed = True
            job.cancel(self._device)

    def close(self) -> None:
        if self._latest is not None:
            self._latest.call_off()
        self._lane.close()

    def _run(self) -> None:
        while (batch := self._lane.next()) is not None:
            try:
                self._save(batch)
            except Exception:  # the root of this thread: a defect must cost later hits, never the engine
                self._logger.exception("EMS save failed")
                for job in batch.jobs:
                    self._guarded(self._give_up, job)
            finally:
                for job in batch.jobs:
                    self._close_job(job)

    def _save(self, batch: SaveBatch) -> None:
        for job in batch.jobs:
            self._guarded(self._reserve, job)
        if batch.by_layer:
            self._copy_by_layer(batch)
        in_time, mark = batch.progress.wait(None, COMPUTE_SECONDS)
        if not in_time:
            self._logger.warning("EMS gave up saving: the engine did not compute for %.0f s", COMPUTE_SECONDS)
            batch.call_off()
        else:
            self._device.wait_for(mark)
            if any(job.copies for job in batch.jobs):
                batch.next_step.wait(OUTPUT_SECONDS)
        for job in batch.jobs:
            self._guarded(self._store if not batch.by_layer else self._publish, job)
            self._close_job(job)

    def _guarded(self, step: Callable[[SaveJob], object], job: SaveJob) -> None:
        try:
            step(job)
        except EmsError as error:
            self._give_up(job)
            self._lane.ended(SaveResult(job.save.request_id, error=type(error).__name__))
            if not self._failing:
                self._failing = True
                self._logger.warning("EMS cannot store blocks, serving on without it: %s", error)
        except Exception:  # the root of a save: a defect must cost a later hit, never the engine
            self._give_up(job)
            self._logger.exception("EMS save for request %s failed", job.save.request_id)

    def _give_up(self, job: SaveJob) -> None:
        """The pool gives the slots to nobody before it is told that no copy of the job runs any more."""
        reserved, job.reservation = job.reservation, None
        if reserved is not None:
            self._device.synchronise()  # what failed may have been in the middle of its copies
            self._give_back(reserved)

    def _reserve(self, job: SaveJob) -> None:
        parent, job.pages = job.plane.stored(job.save)
        if not job.pages or job.cancelled:
            return
        keys, tails = [page.key for page in job.pages], [page.tail for page in job.pages]
        name = job.plane.namespace.name
        if (name, parent) in self._unstored:  # nobody would find these, and others would leave for them
            del self._unstored[name, parent]
            self._note_unstored(name, keys[-1])
            return
        with self._asking():
            reserved = self._client.reserve(job.plane.namespace, parent, keys, self._call_timeout, tails)
        if reserved.outcomes[-1] not in STORED:
            self._note_unstored(name, keys[-1])
        if self._failing:
            self._failing = False
            self._logger.info("EMS stores blocks again")
        if reserved.packed_refs:
            job.reservation = reserved
            self._clear_partial(job, reserved)
        # Memory of a node that has just started is still being touched; it may be by the time the step is over.
        job.again = not reserved.packed_refs and Outcome.NOT_TOUCHED in reserved.outcomes

    def _note_unstored(self, name: str, key: bytes) -> None:
        self._unstored[name, key] = None
        if len(self._unstored) > MAX_UNSTORED:
            del self._unstored[next(iter(self._unstored))]

    def _clear_partial(self, job: SaveJob, reserved: Reservation) -> None:
        """Of a page that is not written whole the rest would be what somebody else, perhaps another tenant, left."""
        namespace, rows = job.plane.namespace, job.plane.rows
        for position in reserved.positions:
            if len(job.pages[position].part.blocks) < rows.page_blocks:
                page = self._client.segments(reserved.epoch).page(reserved.granted[position], namespace.page_size)
                np.frombuffer(page, np.uint8)[:] = 0

    # Whole blocks

    def _store(self, job: SaveJob) -> None:
        if job.again and not job.cancelled:
            self._reserve(job)
        if (reserved := job.reservation) is not None:
            written = self._copy(job, reserved, ALL)
            self._commit(job, reserved, [] if job.mixed else written)

    def _copy(self, job: SaveJob, reserved: Reservation, tensors: slice) -> list[int]:
        begin = time.perf_counter()
        segments = self._client.segments(reserved.epoch)
        namespace, rows = job.plane.namespace, job.plane.rows
        written: list[int] = []
        positions = reserved.positions
        copied, of = len(rows.tensors[tensors]), len(rows.tensors)  # one layer of a page is a smaller page
        count = self._device.pages_at_once(-(-rows.page_bytes * copied // of), rows.page_copies * copied // of)
        for start in range(0, len(positions), count):
            batch = positions[start : start + count]
            if self._client.epoch != reserved.epoch:
                raise StaleReference("the connection to the pool was lost while blocks were copied")
            starts, memory = segments.places(reserved.refs(batch), namespace.page_size)
            slots = Slots(starts, namespace.page_size, memory)
            parts = [job.pages[position].part for position in batch]
            sums = PageSums(slots)
            summed = self._device.sums and tensors == ALL
            plan = rows.plan(parts, slots, out=True, tensors=tensors)
            for step in plan.in_steps(self._device.step_bytes, in_order=summed):
                if not job.copy(self._device, step.plan, sums):
                    break
                sums.whole = step.whole
            written += batch[: sums.whole]
            if summed:
                job.checksums.update(zip(batch, sums.done, strict=False))
            if sums.whole < len(batch):
                break
        self._device.synchronise()
        job.seconds += time.perf_counter() - begin
        return written

    def _commit(self, job: SaveJob, reserved: Reservation, written: list[int]) -> None:
        # Of the bytes as they lie in the slots; the engine may have its blocks back meanwhile.
        self._close_job(job)
        if written:
            segments, size = self._client.segments(reserved.epoch), job.plane.namespace.page_size
            for position in [position for position in written if position not in job.checksums]:
                job.checksums[position] = crc32c(segments.page(reserved.granted[position], size))
            checksums = [job.checksums[position] for position in written]
            with self._asking():
                self._client.commit(reserved, written, self._call_timeout, checksums)
            # A page counts once, however many shards of it are here.
            leading = job.pages[: len(written) : job.plane.local.portion.count] if job.plane.local.leading else []
            blocks = sum(len(page.part.blocks) for page in leading)
            stored = len(written) * job.plane.rows.page_bytes
            self._lane.ended(SaveResult(job.save.request_id, stored, job.seconds, blocks))
        if len(written) < len(reserved.positions):
            self._give_back(reserved)

    # Layer by layer

    def _copy_by_layer(self, batch: SaveBatch) -> None:
        for layer in self._order.layers:
            jobs = [job for job in batch.jobs if job.plane.local.number == layer.plane]
            in_time, mark = batch.progress.wait(layer.name, COMPUTE_SECONDS)
            if not in_time:
                return
            self._device.wait_for(mark)
            for job in jobs:
                self._guarded(lambda job, tensors=layer.tensors: self._copy_layer(job, tensors), job)  # type: ignore[misc]

    def _copy_layer(self, job: SaveJob, tensors: slice) -> None:
        reserved = job.reservation
        if reserved is None or job.cancelled:
            return
        if len(self._copy(job, reserved, tensors)) < len(reserved.positions):
            # Called off: a page that lacks a layer is none.
            self._give_up(job)

    def _publish(self, job: SaveJob) -> None:
        if job.reservation is not None:
            self._commit(job, job.reservation, [] if job.cancelled else job.reservation.positions)

    def _give_back(self, reserved: Reservation) -> None:
        with suppress(EmsError), self._asking():  # the connection is gone, and with it the reservation
            self._client.abort(reserved, self._call_timeout)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._asked = self._clock()
        try:
            yield
        finally:
            self._asked = None

    def _close_job(self, job: SaveJob) -> None:
        """The job reads its blocks no more; harmless when repeated."""
        number = job.save.number
        with self._lock:
            if job.closed.is_set():
                return
            job.closed.set()
            self._open[number].remove(job)
            if not self._open[number]:
                del self._open[number]
                self._over.append(number)
        self._lane.news = True
