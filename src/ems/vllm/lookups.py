"""The lookups of one engine, in a thread beside its scheduler.

A lookup goes on while tiers promote more of the prompt and the scheduler has not asked for the request.  Meanwhile a
lease holds what was found, and an announcement holds what is promoted.  While a request waits in the queue its answer
is checked now and then: there may be more, or the node that gave the lease may be gone.  What always holds: a lookup
gives back what it holds when its request needs it no longer; the leases of an answer belong to whoever takes it;
whatever goes wrong is a miss with a reason in the log.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ems.errors import EmsError, NoSpace, PoolUnavailable
from ems.pool.client.answers import Announcement, Lease, Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, KeyChain, page_keys
from ems.pool.protocol.limits import MAX_KEYS
from ems.pool.reasons.words import Reason
from ems.transfers.lane import Lane
from ems.vllm.configuration.settings import ConnectorSettings
from ems.vllm.planes import Plane
from ems.vllm.reporting.observer import Observer
from ems.vllm.requests import NOTHING, Found
from ems.vllm.search import Prompt, Search
from ems.vllm.waiting import QUEUED_PAUSE, Waiting

logger = logging.getLogger("vllm.ems.lookups")

NOTICE_SECONDS = 1.0
"""How often an idle thread looks whether its node is still there."""
RESTART_SECONDS = 10.0
"""How often a missing node is started again."""
LOOK_AGAIN_SECONDS = 0.25
"""When an answer that waits for the scheduler is checked for the first time."""
PARTS = 8
"""What is promoted while an answer waits is answered in at most so many parts.  Each part counts as a use."""
RENEW_SECONDS = 60.0
"""When an announcement is renewed, before the node drops it."""
PATIENCE_SECONDS = 0.004
"""How long the node may wait for tiers that it has to ask, in each call, while no other request is to be looked at.
A cluster's master answers in about 1 ms."""
YIELD_CHUNKS = 128
"""Keys that are made in one go, about 150 us."""
YIELD_SECONDS = 0.00005
"""Pause between two goes."""


class LookupJob(msgspec.Struct, eq=False):
    """One request to look up.

    ``extra_keys`` makes what else names its chunks of so many tokens, one entry a chunk, the last one too.
    """

    request_id: str
    tokens: Sequence[int]
    extra_keys: Callable[[int], Sequence[object]]
    waiting: Waiting
    adapter: str = ""
    """What stands for the request's adapter behind the name where keys begin."""
    explain: bool = False
    """Whether somebody wants to know why not more was found."""
    due: bool = False
    """Whether the scheduler asks for it; set on the scheduler's thread."""
    over: bool = False
    """Whether nobody wants to know any more; set on the scheduler's thread."""
    begun: bool = False
    """Whether its first look has begun; set by whoever looks, before it sees whether it is ``due``."""

    # Used by whoever looks, alone.
    prompt: Prompt | None = None
    promoting: bool = False
    """Whether the request waits for chunks that tiers promote."""
    held: Found = NOTHING
    """What leases hold while more is promoted."""
    announced: list[Announcement] = msgspec.field(default_factory=list)
    renew_at: float = 0.0
    answer: Found | None = None
    """What was answered last."""
    look_at: float = 0.0
    """When it is looked at again, while it is on the agenda."""


class LookupAnswer(msgspec.Struct, frozen=True):
    """The end of a lookup: the keys of the request's full chunks (None: they cannot be made), and what was found.

    ``reason`` says why not more, where that is known.
    """

    request_id: str
    chain: KeyChain | None
    found: Found
    reason: Reason | None = None
    detail: str = ""
    """What else is known of the reason; only for requests to be explained."""


class Lookups:
    """All lookups of one engine over ``planes``; its thread begins with :meth:`start`.

    ``observer`` says whether the pool may be asked for what need not be, and is told of every error of the pool.
    Without ``tails`` full chunks alone are looked for.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        client: PoolClient,
        planes: Sequence[Plane],
        chunk_tokens: int,
        chain_name: str,
        observer: Observer,
        *,
        tails: bool = True,
    ) -> None:
        self._client = client
        self._planes = planes
        self._observer = observer
        self._search = Search(client, planes, chunk_tokens, settings.call_timeout, tails=tails)
        self._chunk_tokens = chunk_tokens
        self.chain_name = chain_name
        """Where chains of keys begin; another name makes all pages stored before unfindable."""
        self._settings = settings
        self._agenda: set[LookupJob] = set()
        """Few: so many requests as may wait with a lookup."""
        self._next_start = 0.0
        self._said: str | None = None
        self._jobs: dict[str, LookupJob] = {}
        """Those of requests that wait; the scheduler's thread alone uses it."""
        self._lane: Lane[LookupJob | Lease, tuple[LookupJob, LookupAnswer]] = Lane("ems-lookup", self._run)
        self.start = self._lane.start

    # The scheduler's side

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
            if job.begun:  # or else it is queued, and its first look sees this
                self._lane.put(job)

    def forget(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.over = True
            self._lane.put(job)

    def release(self, lease: Lease) -> None:
        self._lane.put(lease)

    def age(self, request_id: str, now: float) -> float:
        """Seconds since a request was asked for; 0 for one that was not, or is forgotten."""
        job = self._jobs.get(request_id)
        return 0.0 if job is None else now - job.waiting.asked_at

    def comes_up(self, request_id: str) -> bool:
        """Whether a request's lookup waits for pages that come up from tiers."""
        job = self._jobs.get(request_id)
        return job is not None and job.promoting

    def answers(self, wait: float = 0.0, of: str = "") -> list[LookupAnswer]:
        """Answers since the last call; waits at most ``wait`` seconds until that ``of`` a request is among them."""
        until = time.monotonic() + wait
        results = self._lane.results(wait)
        while all(job.over or job.request_id != of for job, _ in results) and (left := until - time.monotonic()) > 0:
            results += self._lane.results(left)
        for job, answer in results:
            if job.over:
                # A request that came since may have the same name.
                for lease in answer.found.leases:
                    self.release(lease)
        return [answer for job, answer in results if not job.over]

    def close(self) -> None:
        self._lane.end()

    # The thread

    def _run(self) -> None:
        waited = False
        while True:
            wake = self.next_at
            # Who comes in and who waits have turns: neither holds up the other.
            waited = not waited
            item: LookupJob | Lease | None = self.next_job(time.monotonic()) if waited else None
            try:
                if item is None:
                    item = self._lane.next(NOTICE_SECONDS if wake is None else max(wake - time.monotonic(), 0))
                    if item is None:
                        return
            except queue.Empty:
                item = self.next_job(time.monotonic())
            try:
                if item is None:
                    self._client.notice()
                else:
                    self.handle(item, time.monotonic())
            except Exception:  # the root of this thread: a defect must cost hits, never the engine
                logger.exception("EMS lookup failed, what was asked for is computed")
                if isinstance(item, LookupJob):
                    self._answer(item, LookupAnswer(item.request_id, None, NOTHING, Reason.LOOKUP_FAILED))

    @property
    def next_at(self) -> float | None:
        return min((job.look_at for job in self._agenda), default=None)

    def next_job(self, now: float) -> LookupJob | None:
        """The next request that is due; None if none is yet."""
        job = min(self._agenda, key=lambda job: job.look_at, default=None)
        return job if job is not None and job.look_at <= now else None

    def handle(self, item: LookupJob | Lease, now: float) -> None:
        """Handle a request that is new, that the scheduler asks for or that is over; or release a lease."""
        if isinstance(item, Lease):
            self._client.release(item)
            return
        item.begun = True
        self._agenda.discard(item)
        pause = self._look(item, now)
        if pause is not None:
            item.look_at = now + pause
            self._agenda.add(item)

    def _missed(self, error: EmsError) -> None:
        said = self._observer.failed(error)
        kind = type(error).__name__
        if not said and kind != self._said:
            self._said = kind
            serve = "blocks are computed and not stored" if isinstance(error, NoSpace) else "serving on without it"
            logger.warning("EMS pool cannot be used, %s: %s", serve, error)
        now = time.monotonic()
        if isinstance(error, PoolUnavailable) and now >= self._next_start:
            self._next_start = now + RESTART_SECONDS
            threading.Thread(target=self._observer.start_node, name="ems-start-node", daemon=True).start()

    # One lookup

    def _look(self, job: LookupJob, now: float) -> float | None:
        if job.over:
            self._let_go(job)
            return None
        if job.due:
            job.waiting.hurry(now)
        if job.answer is not None:
            return self._look_again(job, job.answer, now)
        prompt = job.prompt = job.prompt or self._name_chunks(job)
        try:
            found = self._found(job, prompt, now)
        except EmsError as error:
            self._missed(error)
            found = NOTHING
            answer = LookupAnswer(job.request_id, prompt.chain, found, Reason.LOOKUP_FAILED)
        else:
            if found is None:
                return job.waiting.pause()
            if self._said is not None:
                self._said = None
                logger.info("EMS pool is in use again")
            reason = self._search.reason
            reason, detail = self._why(prompt, found, reason) if job.explain else (reason, "")
            answer = LookupAnswer(job.request_id, prompt.chain, found, reason, detail)
        self._let_go(job)
        job.answer = found
        self._answer(job, answer)
        return None if job.due else LOOK_AGAIN_SECONDS

    def _answer(self, job: LookupJob, answer: LookupAnswer) -> None:
        """Answer, unless the request is over: an idle engine would not collect the answer for long."""
        if job.over:
            self._release(answer.found)
        else:
            self._lane.ended((job, answer))

    def _found(self, job: LookupJob, prompt: Prompt, now: float) -> Found | None:
        """What a lease now holds for the request; None if the request should wait for more."""
        if job.waiting.expected:
            tokens, pending = self._search.reach(prompt)
            if job.waiting.for_prefill(tokens, pending, self._settings.handoff_timeout, now):
                return None
        busy = self._lane.waiting or (self.next_at is not None and self.next_at < now + PATIENCE_SECONDS)
        self._search.patience = 0.0 if busy else PATIENCE_SECONDS
        # In the queue a tier may take its time.
        queued = job.promoting and not job.waiting.due
        self._search.computing = 0.0 if queued else self._observer.seconds_a_token * self._chunk_tokens
        if job.promoting:
            tokens = self._search.reach(prompt)[0]
            if self._promotes(job, tokens, now):
                self._announce(job, prompt, max(tokens // self._chunk_tokens, job.held.chunks), now)
                return None
        found = self._search.take(prompt)
        if job.promoting or not self._promotes(job, found.tokens, now):
            return found
        job.promoting, job.held = True, found
        self._announce(job, prompt, found.chunks, now)
        return None

    def _name_chunks(self, job: LookupJob) -> Prompt:
        chains: dict[int, KeyChain] = {}
        for parts in {1, *(plane.parts for plane in self._planes)}:
            size = self._chunk_tokens // parts
            chain, extra = KeyChain(self.chain_name + job.adapter, size), job.extra_keys(size)
            while len(chain) < len(job.tokens) // size:
                if len(chain):
                    time.sleep(YIELD_SECONDS)  # hands the interpreter, which hashing holds, to the scheduler's thread
                chain.extend(job.tokens, extra, len(chain) + YIELD_CHUNKS)
            chains[parts] = chain
        return Prompt(job.tokens, chains.pop(1), job.extra_keys, job.request_id, chains)

    def _why(self, prompt: Prompt, found: Found, reason: Reason | None) -> tuple[Reason | None, str]:
        """Why the first missing chunk is missing: :attr:`Reason.GAP` where chunks behind it are there."""
        plane = self._planes[0]
        if found.tokens >= len(prompt.tokens):
            return reason, ""
        full = len(prompt.chain)
        names = prompt.chain.packed(found.chunks, min(full, found.chunks + MAX_KEYS // plane.shards - 1))
        tail = self._search.tail_name(prompt, full)
        keys = page_keys(names + (tail.key if tail is not None else b""), plane.shards)
        try:
            explanation = self._client.explain(plane.namespace, keys, self._settings.call_timeout)
        except EmsError as error:
            # What was found before is not lost for it.
            self._missed(error)
            return reason, ""
        codes, detail = explanation.codes, explanation.detail
        why = Reason.of_code(next((code for code in codes if code), 0)) or reason
        # A chunk is there when all of its pages are.
        chunks = (codes[at : at + plane.shards] for at in range(0, len(codes), plane.shards))
        there = [all(code in (0, Reason.GAP.code) for code in chunk) for chunk in chunks]
        if self._search.states and any(there[:1]):
            return Reason.NO_STATE, detail
        if any(there[1:]):
            return Reason.GAP, "; ".join(text for text in (why.value if why else "", detail) if text)
        return why, detail

    def _promotes(self, job: LookupJob, tokens: int, now: float) -> bool:
        """Whether to wait for the chunks behind ``tokens`` tokens that the last search saw being promoted."""
        promoting = min(self._search.promoting * self._chunk_tokens, len(job.tokens) - tokens)
        return job.waiting.for_tiers(
            tokens, promoting, self._observer.seconds_a_token, self._settings.tier_timeout, now
        )

    # While the request stands in the queue

    def _look_again(self, job: LookupJob, answer: Found, now: float) -> float | None:
        """Check an answer: the pool may have more by now, or the node that gave the lease may be gone."""
        if job.due:
            self._let_go(job)
            return None
        assert job.prompt is not None
        pause = max(job.waiting.pause(), LOOK_AGAIN_SECONDS)
        if not self._observer.usable:
            return pause
        try:
            self._client.notice()
            lost = any(lease.epoch != self._client.epoch for lease in answer.leases)
            if lost or self._more(job, job.prompt, answer, now):
                found = self._search.take(job.prompt)
                if not lost and found.tokens <= answer.tokens:
                    self._release(found)
                    return pause
                if not self._search.promoting:
                    self._let_go(job)
                job.answer = found
                self._answer(job, LookupAnswer(job.request_id, job.prompt.chain, found, self._search.reason))
        except EmsError as error:
            self._missed(error)
            return QUEUED_PAUSE
        return pause

    def _more(self, job: LookupJob, prompt: Prompt, answer: Found, now: float) -> bool:
        """Whether memory has enough more of the prompt for another answer.  Announces what is being promoted."""
        if answer.chunks >= len(prompt.chain) or not self._coming(prompt, answer.chunks):
            return False
        self._search.computing = 0.0
        tokens = self._search.reach(prompt)[0]
        least = 1
        if self._search.promoting:
            self._announce(job, prompt, max(tokens // self._chunk_tokens, answer.chunks), now)
            least = max(len(job.tokens) // PARTS, 1)
        return tokens - answer.tokens >= least

    def _coming(self, prompt: Prompt, first: int) -> bool:
        """Whether every plane has chunk ``first`` in memory or promotes it.  Starts to promote what follows."""
        return all(
            self._client.prefetch(name, keys, self._settings.call_timeout) >= plane.shards
            for end in (first + 1, len(prompt.chain))
            for plane, name, keys in self._pages(prompt, first, end)
            if not plane.window
        )

    def _pages(self, prompt: Prompt, first: int, end: int) -> Iterator[tuple[Plane, Namespace, bytes]]:
        for plane in self._planes:
            begin = first * plane.parts
            keys = prompt.chain_of(plane).packed(begin, min(end * plane.parts, begin + MAX_KEYS // plane.shards))
            yield plane, Namespace(plane.namespace, 0), page_keys(keys, plane.shards)

    # What is kept meanwhile

    def _announce(self, job: LookupJob, prompt: Prompt, first: int, now: float) -> None:
        """Keep what is promoted from chunk ``first`` on in memory until a lease holds it; renewed in time."""
        if job.announced and now < job.renew_at:
            return
        before, job.announced = job.announced, []
        start = job.held.chunks if job.answer is None else job.answer.chunks
        for _, name, keys in self._pages(prompt, start, first + self._search.promoting):
            if len(keys) >= KEY_BYTES:
                announced = self._client.announce(name, keys, self._settings.call_timeout)
                job.announced += [] if announced is None else [announced]
        job.renew_at = now + RENEW_SECONDS
        self._withdraw(before)

    def _let_go(self, job: LookupJob) -> None:
        held, job.held = job.held, NOTHING
        announced, job.announced = job.announced, []
        self._release(held)
        self._withdraw(announced)

    def _release(self, found: Found) -> None:
        for lease in found.leases:
            self._client.release(lease)

    def _withdraw(self, announced: Sequence[Announcement]) -> None:
        for one in announced:
            self._client.withdraw(one)
