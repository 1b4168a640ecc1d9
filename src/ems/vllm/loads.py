"""Copies pool pages into engine blocks, in a thread beside the engine's compute.

What always holds: a loaded block is reported good only if the headers of all its pages said the same before and
after the copy, and their bytes were right as far as these are checked; every load ends, whatever fails, and its end
is reported exactly once; nothing is copied into the blocks of a load whose end was reported.

A load that does not go on is given up: it counts as failed, and its copies that have not begun never do.  A copy that
has begun cannot be called back.  Only the kernel can keep one from ending (memory on a disk that is gone), and whoever
waits for it goes on waiting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging import Logger

import msgspec

from ems.errors import EmsError, PoolTimeout, StaleReference
from ems.pool.client.pool_client import PoolClient
from ems.pool.segments.reader import LeasedPages, PageReader
from ems.transfers.device import Device
from ems.transfers.lane import Lane
from ems.transfers.plan import ALL, CopyPlan, Slots
from ems.transfers.rows import PartsOfPages
from ems.vllm.layers import LayerOrder, Progress
from ems.vllm.pages import PlaneRows
from ems.vllm.requests import Load, LoadPart

NOTICE_SECONDS = 1.0
"""How often an idle thread looks whether its node is still there."""

LOAD_SECONDS = 60.0
"""How long nothing may go on before loads are given up, and how long a step waits for one; copies take milliseconds."""


class LoadResult(msgspec.Struct, frozen=True):
    """A load that ended: how many of its blocks hold what they should, the others, and how long it took.

    ``sound`` is False when any block of it holds nothing.  ``in_step`` loads are part of the step that asked for them.
    ``error`` is the class of what made it fail as a whole.
    """

    request_id: str
    failed_blocks: set[int]
    loaded: int
    bytes: int
    seconds: float
    sound: bool
    in_step: bool
    error: str = ""


class LoadJob:
    """One load on its way.  ``in_step``: the step that asked for it waits, layer by layer or for all of it."""

    def __init__(self, load: Load, mark: object, *, in_step: bool) -> None:
        self.load = load
        self.mark = mark
        self.in_step = in_step
        self.progress = Progress()
        self.sound = False
        self.ended = False
        """Whether its end was reported; changes while :attr:`copying` is held."""
        self.copying = threading.Lock()
        """Held by each of its copies."""


@dataclass
class PlaneLoad:
    """One plane's part of a load; of its pages the ``good`` leading ones are right as far as is known."""

    plane: PlaneRows
    part: LoadPart
    reader: PageReader
    parts: PartsOfPages
    leased: LeasedPages
    good: int


class Loader:
    """Loads of one rank, whose planes are ``planes``."""

    def __init__(
        self,
        client: PoolClient,
        planes: Sequence[PlaneRows],
        device: Device,
        logger: Logger,
        call_timeout: float,
        *,
        by_layer: bool = False,
    ) -> None:
        self._by_layer = by_layer
        self._call_timeout = call_timeout
        self._client = client
        self._planes = {plane.local.number: plane for plane in planes}
        self._order = LayerOrder(planes)
        self._device = device
        self._logger = logger
        self._jobs: list[LoadJob] = []
        """Loads whose ends were not collected."""
        self._moved_at = 0.0
        self._stuck = False
        """Whether loads were given up since one ended: those that come meanwhile are as well."""
        self._lane: Lane[LoadJob, LoadResult] = Lane("ems-load", self._run)
        self._lane.start()

    @property
    def news(self) -> bool:
        """Whether loads may have ended, or are to be given up, since :meth:`results`."""
        return self._lane.news or self._overdue

    @property
    def _overdue(self) -> bool:
        return bool(self._jobs) and time.monotonic() - self._moved_at > LOAD_SECONDS

    def start(self, load: Load, mark: object, *, in_step: bool = False) -> LoadJob:
        """Queue a load, to begin once the engine's work up to ``mark`` is over: that may write into the same blocks."""
        if not self._jobs:
            self._moved_at = time.monotonic()
        job = LoadJob(load, mark, in_step=in_step)
        self._jobs.append(job)
        if self._stuck:
            self._end(job, None, 0.0, PoolTimeout.__name__)
        else:
            self._lane.put(job)
        return job

    def wait(self, job: LoadJob, layer: str | None) -> None:
        """Wait until ``layer`` of a load (None: all of it) is there; in the end all that wait for one are given up."""
        if job.progress.wait(layer, LOAD_SECONDS)[0]:
            return
        self._logger.warning("EMS gives up a load that a step waits for, once no copy of it is being made")
        for other in self._jobs:
            if other.in_step:
                self._give_up(other)

    def results(self, wait: float = 0.0) -> list[LoadResult]:
        """Loads that ended since the last call; waits at most ``wait`` seconds for the first, if any is under way."""
        if self._overdue:
            for job in self._jobs:
                self._give_up(job, blocking=False)
        results = self._lane.results(wait if self._jobs else 0.0)
        self._jobs = [job for job in self._jobs if not job.ended]
        return results

    def _give_up(self, job: LoadJob, *, blocking: bool = True) -> None:
        """End a load as failed before its next copy; one that is being made is waited for if ``blocking``."""
        if not job.copying.acquire(blocking=blocking):
            return
        try:
            if not job.ended:
                if not self._stuck:
                    self._logger.warning(
                        "EMS loads have not gone on for %.0f s, their blocks are computed", LOAD_SECONDS
                    )
                self._stuck = True
                # An accelerator may have been told of copies that it has not made yet.
                self._device.synchronise()
                self._end(job, None, LOAD_SECONDS, PoolTimeout.__name__)
        finally:
            job.copying.release()

    def close(self) -> None:
        self._lane.close()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._make(job)
            self._stuck = False

    def _make(self, job: LoadJob) -> None:
        load = job.load
        if job.ended:
            return
        begin = time.perf_counter()
        lost: dict[int, set[int]] | None = None
        failure = ""
        try:
            lost = self._load(job)
        except EmsError as error:
            failure = type(error).__name__
            self._logger.warning("EMS load for request %s failed, it is computed: %s", load.request_id, error)
        except Exception as error:  # the root of a load: a defect must cost a recompute, never the engine
            failure = type(error).__name__
            self._logger.exception("EMS load for request %s failed, it is computed", load.request_id)
        with job.copying:
            if not job.ended:
                self._end(job, lost, time.perf_counter() - begin, failure)

    def _end(self, job: LoadJob, lost: dict[int, set[int]] | None, seconds: float, failure: str) -> None:
        result = self._result(job, lost, seconds, failure)
        job.sound = result.sound
        job.ended = True
        self._moved_at = time.monotonic()
        self._lane.ended(result)
        job.progress.finish()

    @contextmanager
    def _copying(self, job: LoadJob) -> Iterator[None]:
        """One copy of a load, which may be given up before it but not while it is made."""
        with job.copying:
            if job.ended:
                raise PoolTimeout("the load was given up")
            yield
            self._moved_at = time.monotonic()

    def _result(self, job: LoadJob, lost: dict[int, set[int]] | None, seconds: float, error: str) -> LoadResult:
        load = job.load
        failed: set[int] = set()
        for part in load.parts:
            failed |= set(part.block_ids) if lost is None else lost.get(part.plane, set())
        sound = lost is not None and not failed
        good = {part.plane: len(set(part.block_ids) - failed) for part in load.parts}
        size = sum(plane.block_bytes * good.get(number, 0) for number, plane in self._planes.items())
        loaded = max(good.values(), default=0)
        return LoadResult(load.request_id, failed, loaded, size, seconds, sound, job.in_step, error)

    def _next(self) -> LoadJob | None:
        while True:
            try:
                return self._lane.next(NOTICE_SECONDS)
            except queue.Empty:
                self._notice()

    def _notice(self) -> None:
        try:
            self._client.notice()
            with suppress(EmsError):  # said again a moment later
                self._client.tell_stopped(self._call_timeout)
        except Exception:  # the root of this thread, see above
            self._logger.exception("EMS could not look after its connection")

    def _load(self, job: LoadJob) -> dict[int, set[int]]:
        """Copy; returns the engine blocks of each plane, by its number, that hold nothing."""
        load = job.load
        if load.broken:
            raise StaleReference(
                "the engine cannot load what was looked up: it wants another part or has other weights or tensors"
            )
        if self._client.node != load.node:
            # A connection that is there need not wait for its turn behind a save's call, but may have ended unnoticed.
            self._client.notice()
            self._client.connect(self._call_timeout)
        if self._client.node != load.node:
            # Slots of another node, or of the same one before it started again, are other memory.
            raise StaleReference("the pool node that promised the blocks is gone")
        epoch = self._client.epoch
        loads: dict[int, PlaneLoad] = {}
        for part in load.parts:
            if (plane := self._planes.get(part.plane)) is not None:
                reader = self._client.reader(plane.namespace, epoch)
                parts, refs, keys = plane.loaded(part)
                leased = reader.look(refs, keys)
                loads[part.plane] = PlaneLoad(plane, part, reader, parts, leased, leased.present)
        self._device.wait_for(job.mark)
        try:
            if job.in_step and self._by_layer:
                self._copy_by_layer(loads, job)
            else:
                for one in loads.values():
                    self._copy(one, job)
        finally:
            # Also when it fails: the blocks are computed then, and no copy may come after that.
            self._device.synchronise()
        lost: dict[int, set[int]] = {}
        for one in loads.values():
            good = one.reader.same(one.leased, 0, one.good)
            blocks = one.part.block_ids
            # What follows a block that is missing is of no use either.
            lost[one.part.plane] = set(blocks[[*one.parts.begins.tolist(), len(blocks)][good] :])
        self._report(loads.values())
        return lost

    def _report(self, loads: Iterable[PlaneLoad]) -> None:
        for plane, reader in ((one.plane, one.reader) for one in loads):
            if reader.corrupt:
                self._logger.warning("EMS found %d pages that are not right, they are computed", len(reader.corrupt))
                try:
                    self._client.report(plane.namespace, reader, self._call_timeout)
                except EmsError as error:
                    self._logger.warning("EMS could not report them: %s", error)

    def _copy(self, one: PlaneLoad, job: LoadJob) -> None:
        """Copy pages as long as their bytes are right."""
        rows, count = one.plane.rows, one.good
        batch = self._device.pages_at_once(rows.page_bytes, rows.page_copies)
        one.good = 0
        while (begin := one.good) < count:
            for step in self._plan(one, begin, min(begin + batch, count)).in_steps(self._device.step_bytes):
                with self._copying(job):
                    self._device.copy(step.plan)
                end = begin + step.whole
                one.good = one.reader.sound(one.leased, one.good, end)
                if one.good < end:
                    return

    def _plan(self, one: PlaneLoad, begin: int, end: int, tensors: slice = ALL) -> CopyPlan:
        slots = Slots(one.leased.starts[begin:end], one.plane.namespace.page_size, one.leased.segments)
        return one.plane.rows.plan_many(one.parts.span(begin, end), slots, out=False, tensors=tensors)

    def _copy_by_layer(self, loads: Mapping[int, PlaneLoad], job: LoadJob) -> None:
        for layer in self._order.layers:
            if (one := loads.get(layer.plane)) is not None and one.good:
                plan = self._plan(one, 0, one.good, layer.tensors)
                with self._copying(job):
                    self._device.copy(plan)
            self._device.synchronise()
            job.progress.done(layer.name)
        for one in loads.values():
            one.good = one.reader.sound(one.leased, 0, one.good)
