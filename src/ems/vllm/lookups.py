"""Lookups beside the scheduler: a thread asks the node, the scheduler takes the answers when it looks.

The scheduler never waits here.  A decode whose prefill announced blocks waits, bounded, while these are being
written; the decision is :func:`keep_waiting`, a pure function.  Whatever goes wrong is a miss with a reason
in the log.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Sequence
from logging import Logger

import msgspec

from ems.errors import ConfigError, EmsError, NoSpace, PoolUnavailable
from ems.pool.client import Hits, Lease, Namespace, PoolClient
from ems.pool.keys import KeyChain

POLL_SECONDS = 0.002
"""How often a waiting hand-off looks again."""
GRACE_SECONDS = 0.1
"""How long a hand-off waits for blocks that are announced but not even being written yet."""
NOTICE_SECONDS = 1.0
"""How often an idle thread looks whether its node is still there."""
RESTART_SECONDS = 10.0
"""How often a missing node is started again."""


class LookupJob(msgspec.Struct):
    """One request to look up: its tokens, what else names its blocks, how many blocks a prefill announced."""

    request_id: str
    tokens: Sequence[int]
    extra: Callable[[], Sequence[object]]
    expected: int
    asked_at: float
    chain: KeyChain | None = None


class LookupAnswer(msgspec.Struct, frozen=True):
    """What a lookup found: the keys of the request's blocks, leading hits, the lease that keeps them."""

    request_id: str
    chain: KeyChain
    hits: int
    lease: Lease | None


def keep_waiting(hits: Hits, expected: int, waited: float, limit: float) -> bool:
    """Whether a hand-off of ``expected`` blocks goes on waiting after ``waited`` seconds, at most ``limit``.

    Blocks that are being written are worth the whole wait; blocks of which nothing is to be seen only
    :data:`GRACE_SECONDS`.
    """
    if hits.count >= expected or waited >= limit:
        return False
    return hits.pending > 0 or waited < GRACE_SECONDS


class Lookups:
    """The lookup thread of one scheduler.

    ``start_node``, where given, is called to bring a missing node back.
    """

    def __init__(
        self,
        client: PoolClient,
        namespace: Namespace,
        block_size: int,
        logger: Logger,
        *,
        handoff_timeout: float,
        call_timeout: float,
        start_node: Callable[[], object] | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._block_size = block_size
        self._logger = logger
        self._handoff_timeout = handoff_timeout
        self._call_timeout = call_timeout
        self._start_node = start_node
        self._next_start = 0.0
        self._said: str | None = None
        self._inbox: queue.Queue[LookupJob | Lease | None] = queue.Queue()
        self._answers: queue.SimpleQueue[LookupAnswer] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ems-lookup", daemon=True)
        self._thread.start()

    def ask(self, job: LookupJob) -> None:
        """Queue a lookup."""
        self._inbox.put(job)

    def release(self, lease: Lease) -> None:
        """Queue a lease to be given back."""
        self._inbox.put(lease)

    def answers(self) -> list[LookupAnswer]:
        """What was found since the last call; never waits."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def close(self) -> None:
        """End the thread once what it does now is done."""
        self._inbox.put(None)

    def _run(self) -> None:
        waiting: list[tuple[float, int, LookupJob]] = []
        order = 0
        while True:
            timeout = max(waiting[0][0] - time.monotonic(), 0) if waiting else NOTICE_SECONDS
            try:
                job = self._inbox.get(timeout=timeout)
            except queue.Empty:
                if not waiting:
                    self._client.notice()
                    continue
                job = heapq.heappop(waiting)[2]
            if job is None:
                return
            if isinstance(job, Lease):
                self._client.release(job)
                continue
            try:
                finished = self._look(job)
            except Exception:
                # Root of this thread: a defect here must cost hits, never the engine.
                self._logger.exception("EMS lookup failed, the request is computed")
                self._answers.put(LookupAnswer(job.request_id, self._new_chain(), 0, None))
                continue
            if not finished:
                order += 1
                heapq.heappush(waiting, (time.monotonic() + POLL_SECONDS, order, job))

    def _new_chain(self) -> KeyChain:
        return KeyChain(self._namespace.name, self._block_size)

    def _look(self, job: LookupJob) -> bool:
        """Ask for one request; False when it should be asked again later."""
        if job.chain is None:
            job.chain = self._new_chain()
            job.chain.extend(job.tokens, job.extra())
        keys = job.chain.joined(0, len(job.chain))
        try:
            if job.expected:
                probe = self._client.lookup(self._namespace, keys, timeout=self._call_timeout)
                if keep_waiting(probe, job.expected, time.monotonic() - job.asked_at, self._handoff_timeout):
                    return False
            hits = self._client.lookup(self._namespace, keys, lease=True, timeout=self._call_timeout)
        except EmsError as error:
            self._missed(error)
            self._answers.put(LookupAnswer(job.request_id, job.chain, 0, None))
            return True
        self._recovered()
        self._answers.put(LookupAnswer(job.request_id, job.chain, hits.count, hits.lease))
        return True

    def _missed(self, error: EmsError) -> None:
        kind = type(error).__name__
        if kind != self._said:
            self._said = kind
            serve = "blocks are computed and not stored" if isinstance(error, NoSpace) else "serving on without it"
            self._logger.warning("EMS pool cannot be used, %s: %s", serve, error)
        now = time.monotonic()
        if isinstance(error, PoolUnavailable) and self._start_node is not None and now >= self._next_start:
            self._next_start = now + RESTART_SECONDS
            threading.Thread(target=self._start, name="ems-start-node", daemon=True).start()

    def _start(self) -> None:
        assert self._start_node is not None
        try:
            self._start_node()
        except (ConfigError, PoolUnavailable) as error:
            self._logger.warning("EMS cannot start a pool node: %s", error)

    def _recovered(self) -> None:
        if self._said is not None:
            self._said = None
            self._logger.info("EMS pool is in use again")
