"""Lookups beside the scheduler: a thread asks the node, the scheduler takes the answers when it looks.

The scheduler never waits here.  :mod:`ems.vllm.lookup_schedule` knows what is asked, and for how long.  Whatever goes
wrong is a miss with a reason in the log.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from logging import Logger

from ems.errors import EmsError, NoSpace, PoolUnavailable
from ems.pool.client.answers import Lease
from ems.pool.client.pool_client import PoolClient
from ems.pool.reasons.words import Reason
from ems.transfers.lane import Lane
from ems.vllm.lookup_schedule import LookupAnswer, LookupJob, LookupSchedule
from ems.vllm.planes import Plane
from ems.vllm.requests import NOTHING

NOTICE_SECONDS = 1.0
"""How often an idle thread looks whether its node is still there."""
RESTART_SECONDS = 10.0
"""How often a missing node is started again."""


class Lookups(LookupSchedule):
    """The lookup thread of one scheduler.

    ``start_node`` is called to bring a missing node back.
    """

    def __init__(
        self,
        client: PoolClient,
        planes: Sequence[Plane],
        chunk_tokens: int,
        chain_name: str,
        logger: Logger,
        *,
        start_node: Callable[[], None] = lambda: None,
        **timeouts: float,
    ) -> None:
        super().__init__(client, planes, chunk_tokens, chain_name, **timeouts)
        self.failed: Callable[[EmsError], bool] | None = None
        """Told of every error of the pool, on the lookup thread; True where it has said so in the log."""
        self._logger = logger
        self._start_node = start_node
        self._next_start = 0.0
        self._said: str | None = None
        self._jobs: dict[str, LookupJob] = {}
        """Those of requests that wait; the scheduler's thread alone uses it."""
        self._lane: Lane[LookupJob | Lease, tuple[LookupJob, LookupAnswer]] = Lane("ems-lookup", self._run)
        self._lane.start()

    @property
    def news(self) -> bool:
        return self._lane.news

    def ask(self, job: LookupJob) -> None:
        self._jobs[job.request_id] = job
        self._lane.put(job)

    def hurry(self, request_id: str) -> None:
        """The scheduler asks for the request: from now on its lookup waits only where that pays off."""
        job = self._jobs.get(request_id)
        if job is not None and not job.due:
            job.due = True
            self._lane.put(job)

    def forget(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.over = True
            self._lane.put(job)

    def release(self, lease: Lease) -> None:
        self._lane.put(lease)

    def answers(self, wait: float = 0.0) -> list[LookupAnswer]:
        """Answers since the last call; waits at most ``wait`` seconds for the first."""
        results = self._lane.results(wait)
        for job, answer in results:
            if job.over:
                # A request that came since may have the same name.
                for lease in answer.found.leases:
                    self.release(lease)
        return [answer for job, answer in results if not job.over]

    def answer(self, job: LookupJob, answer: LookupAnswer) -> None:
        self._lane.ended((job, answer))

    def close(self) -> None:
        self._lane.end()

    def _run(self) -> None:
        while True:
            wake = self.next_at
            item: LookupJob | Lease | None
            try:
                item = self._lane.next(NOTICE_SECONDS if wake is None else max(wake - time.monotonic(), 0))
                if item is None:
                    return
            except queue.Empty:
                item = self.next_job(time.monotonic())
            if item is None:
                self._notice()
                continue
            try:
                self.handle(item, time.monotonic())
            except Exception:  # the root of what this thread does, see below
                # Root of this thread: a defect here must cost hits, never the engine.
                self._logger.exception("EMS lookup failed, the request is computed")
                if isinstance(item, LookupJob):
                    self.answer(item, LookupAnswer(item.request_id, None, NOTHING, Reason.LOOKUP_FAILED))

    def _notice(self) -> None:
        try:
            self._client.notice()
        except Exception:  # the root of what this thread does, see below
            # Root of this thread: see above.
            self._logger.exception("EMS could not look after its connection")

    def missed(self, error: EmsError) -> None:
        said = self.failed is not None and self.failed(error)
        kind = type(error).__name__
        if not said and kind != self._said:
            self._said = kind
            serve = "blocks are computed and not stored" if isinstance(error, NoSpace) else "serving on without it"
            self._logger.warning("EMS pool cannot be used, %s: %s", serve, error)
        now = time.monotonic()
        if isinstance(error, PoolUnavailable) and now >= self._next_start:
            self._next_start = now + RESTART_SECONDS
            threading.Thread(target=self._start_node, name="ems-start-node", daemon=True).start()

    def recovered(self) -> None:
        if self._said is not None:
            self._said = None
            self._logger.info("EMS pool is in use again")
