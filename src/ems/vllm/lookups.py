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
from ems.pool.client import PoolClient
from ems.pool.keys import KeyChain
from ems.pool.lease import Lease
from ems.vllm.gaps import has_gap
from ems.vllm.planes import Plane
from ems.vllm.reasons import Reason
from ems.vllm.requests import NOTHING, Found
from ems.vllm.search import Prompt, Search

MOST_PAUSE = 0.05
"""Seconds between two looks of a hand-off that has waited for a while."""
GRACE_SECONDS = 0.5
"""How long a hand-off waits for blocks that are announced but not even being written yet."""
YIELD_BLOCKS = 128
"""Keys that are made in one go, about 150 us."""
YIELD_SECONDS = 0.00005
"""Pause between two goes."""
NOTICE_SECONDS = 1.0
"""How often an idle thread looks whether its node is still there."""
RESTART_SECONDS = 10.0
"""How often a missing node is started again."""


class LookupJob(msgspec.Struct):
    """One request to look up.

    ``extra`` makes what else names its blocks, one entry a block, the last one too; ``expected`` tokens were
    announced by a prefill.
    """

    request_id: str
    tokens: Sequence[int]
    extra: Callable[[], Sequence[object]]
    expected: int
    asked_at: float
    prompt: Prompt | None = None
    """Made by the lookup thread."""
    explain: bool = False
    """Whether somebody wants to know why not more was found."""
    pause: float = 0.002
    """Seconds until the next look of a hand-off that waits; grows with each."""


class LookupAnswer(msgspec.Struct, frozen=True):
    """The end of a lookup: the keys of the request's full blocks (None: they cannot be made), and what was found.

    ``reason`` says why not more, where that is known.
    """

    request_id: str
    chain: KeyChain | None
    found: Found
    reason: Reason | None = None


def keep_waiting(tokens: int, pending: bool, expected: int, waited: float, limit: float) -> bool:
    """Whether a hand-off of ``expected`` tokens, of which ``tokens`` are there, goes on waiting after ``waited`` s.

    Blocks that are being written are worth the whole wait of ``limit`` seconds; blocks of which nothing is to be seen
    only :data:`GRACE_SECONDS`.
    """
    if tokens >= expected or waited >= limit:
        return False
    return pending or waited < GRACE_SECONDS


class Lookups:
    """The lookup thread of one scheduler.

    ``start_node``, where given, is called to bring a missing node back.
    """

    def __init__(
        self,
        client: PoolClient,
        planes: Sequence[Plane],
        block_size: int,
        chain_name: str,
        logger: Logger,
        *,
        handoff_timeout: float,
        call_timeout: float,
        start_node: Callable[[], object] | None = None,
    ) -> None:
        self.failed: Callable[[EmsError], bool] | None = None
        """Told of every error of the pool, on the lookup thread; True where it has said so in the log."""
        self._call_timeout = call_timeout
        self._planes = planes
        self._client = client
        self._search = Search(client, planes, block_size, call_timeout)
        self.chain_name = chain_name
        """Where chains of keys begin; another name makes all pages stored before unfindable."""
        self._block_size = block_size
        self._logger = logger
        self._handoff_timeout = handoff_timeout
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
                    self._notice()
                    continue
                job = heapq.heappop(waiting)[2]
            if job is None:
                return
            if isinstance(job, Lease):
                self._release(job)
                continue
            try:
                finished = self._look(job)
            except Exception:  # the root of what this thread does, see below
                # Root of this thread: a defect here must cost hits, never the engine.
                self._logger.exception("EMS lookup failed, the request is computed")
                self._answers.put(LookupAnswer(job.request_id, None, NOTHING, Reason.LOOKUP_FAILED))
                continue
            if not finished:
                order += 1
                heapq.heappush(waiting, (time.monotonic() + job.pause, order, job))
                job.pause = min(job.pause * 2, MOST_PAUSE)

    def _release(self, lease: Lease) -> None:
        try:
            self._client.release(lease)
        except Exception:  # the root of what this thread does, see below
            # Root of this thread: see above.
            self._logger.exception("EMS lease was not released")

    def _notice(self) -> None:
        try:
            self._client.notice()
        except Exception:  # the root of what this thread does, see below
            # Root of this thread: see above.
            self._logger.exception("EMS could not look after its connection")

    def _prompt(self, job: LookupJob) -> Prompt:
        chain, extra = KeyChain(self.chain_name, self._block_size), job.extra()
        whole = len(job.tokens) // self._block_size
        while len(chain) < whole:
            if len(chain):
                # Hashing holds the interpreter, and the scheduler's thread would wait for it.
                time.sleep(YIELD_SECONDS)  # a pause for other threads, nothing is waited for
            chain.extend(job.tokens, extra, len(chain) + YIELD_BLOCKS)
        return Prompt(job.tokens, chain, job.extra)

    def _look(self, job: LookupJob) -> bool:
        """Ask for one request; False when it should be asked again later."""
        prompt = job.prompt = job.prompt or self._prompt(job)
        try:
            if job.expected:
                tokens, pending = self._search.reach(prompt)
                waited = time.monotonic() - job.asked_at
                if keep_waiting(tokens, pending, job.expected, waited, self._handoff_timeout):
                    return False
            found = self._search.take(prompt)
        except EmsError as error:
            self._missed(error)
            self._answers.put(LookupAnswer(job.request_id, prompt.chain, NOTHING, Reason.LOOKUP_FAILED))
            return True
        self._recovered()
        gap = job.explain and self._has_gap(prompt, found)
        self._answers.put(LookupAnswer(job.request_id, prompt.chain, found, Reason.GAP if gap else None))
        return True

    def _has_gap(self, prompt: Prompt, found: Found) -> bool:
        try:
            return has_gap(self._client, self._planes[0], prompt.chain, found.blocks, self._call_timeout)
        except EmsError as error:
            # What was found before is not lost for it.
            self._missed(error)
            return False

    def _missed(self, error: EmsError) -> None:
        said = self.failed is not None and self.failed(error)
        kind = type(error).__name__
        if not said and kind != self._said:
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
