"""One tier of a running node: its threads, its gates, its queue, its speed, and what it counts.

What always holds: a direction is not tried out while a thread of it hangs, so that none opens with threads that are not
there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from ems.errors import TierFailed
from ems.pool.movement.gate import FIRST_PAUSE, MOST_PAUSE, Gate
from ems.pool.movement.promotion import Portion
from ems.pool.movement.questions import Questions
from ems.pool.movement.speed import TierSpeed
from ems.pool.movement.write_back import PreEvictionWalk, Unit, WriteBackQueue
from ems.pool.pages import ClusterWrite, Page
from ems.pool.tiers.answers import ForgetResult
from ems.pool.tiers.seam import Tier
from ems.pool.tiers.settings import TierConfig
from ems.pool.tiers.threads import Clock, Job, NewThreadPool, Tell, ThreadPool

KEEPER_PATIENCE = 6
"""A look at what is there may take so many times the time-out of a read."""
ASKERS = 2
CLUSTER_PAUSES = (0.5, 2.0)
"""Of a cluster's gates, the first and the longest: a standby takes over within ten seconds, and a probe is 4 KiB."""
IDLE_FACTOR = 6
"""Without misses a tier is looked at so much more rarely."""
_COUNTS = (
    *("pages_written", "pages_fetched", "fetch_misses", "fetch_corrupt"),
    *("write_failures", "write_corrupt", "hung", "not_offered"),
    *("hot_runs_told", "copied_ahead", "copied_ahead_used"),
)

_log = structlog.get_logger("ems.tier")


class Errand(Job):
    """What an administrator has a tier do.  It ends, because a tier that hangs is cut out and its errands with it."""

    def outcome(self) -> ForgetResult | str | None:
        """What it did, or why it did not do it; None while it is under way."""
        if self.abandoned:
            return "it hangs and is left alone"
        if not self.done():
            return None
        done: ForgetResult | str = error_text(self.exception()) or self.result()
        return done


class TierState:
    """``tier`` as ``config`` says, number ``number`` of its node from the top."""

    def __init__(
        self,
        number: int,
        config: TierConfig,
        tier: Tier,
        tell: Tell,
        clock: Clock = time.monotonic,
        crew: NewThreadPool = ThreadPool,
    ) -> None:
        self._clock = clock
        self.number = number
        self.config = config
        self.tier = tier
        pauses = CLUSTER_PAUSES if tier.asks else (FIRST_PAUSE, MOST_PAUSE)
        self.reading = Gate("reading", *pauses)
        self.writing = Gate("writing", *pauses)
        self.write_back = WriteBackQueue(config.queue, config.batch)
        self.wishes: set[str] = set()
        """Of a cluster: when writers wished that it gets their pages, where they wished anything."""
        self.pre_eviction = PreEvictionWalk()
        self.speed = TierSpeed(config.readers)
        self.missed = False
        """Whether something was asked for since the last look that was not there."""
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.most_writers = 1 if config.kind == "dir" else min(config.readers, 4)
        self.readers = crew("ems-tier-read", config.readers, tell, clock)
        self.writers = crew("ems-tier-write", self.most_writers, tell, clock)
        self.askers = crew("ems-tier-ask", ASKERS, tell, clock) if tier.asks else None
        self._keeper = crew("ems-tier-keep", 1, tell, clock)
        self._keeping: Job | None = None
        self._errands: deque[Errand] = deque()
        """What the keeper is to do besides, in order."""
        self._probed: list[Gate] = []
        """The directions that are being tried out."""
        self._next_look = 0.0
        self.fetches: dict[Job, tuple[int, Portion]] = {}
        self.writes: dict[Job, list[Unit]] = {}
        self.questions: Questions[Job] = Questions(ASKERS)
        """What a tier that :attr:`~ems.pool.tiers.seam.Tier.asks` is asked."""

    # Health

    def cut(self, reason: str, now: float, *gates: Gate) -> None:
        """The tier failed in the directions of ``gates``."""
        if cut := [gate.direction for gate in gates if gate.failed(reason, now)]:
            told = {"tier": self.config.name, "direction": " and ".join(cut), "reason": reason}
            _log.warning("a tier does not work and is left alone", **told)

    def hung(self, now: float) -> list[Job]:
        """Jobs that take longer than the tier may, which count as failures."""
        limit, keeping = self.config.timeout, self._keeping
        late = [job for job in (*self.fetches, *self.writes) if not job.abandoned and job.runs_for(now) > limit]
        if keeping is not None and not keeping.abandoned and keeping.runs_for(now) > KEEPER_PATIENCE * limit:
            keeping.abandoned = True
            self.counts["hung"] += 1
            self.cut("a look at what is there hangs", now, self.reading, self.writing)
            for errand in self._errands:
                errand.abandoned = errand.cancel()
            self._errands.clear()
        self.counts["hung"] += len(late)
        return late

    # Keeping order

    def keep(self, now: float) -> None:
        """Have the tier looked at, or tried out, when that is due; one at a time."""
        if self._keeping is not None:
            return
        if self._errands:
            self._give(self._errands.popleft())
        elif self.reading.open and self.writing.open:
            if now >= self._next_look:
                self._give(Job(self.tier.maintain, self._looked))
        elif due := [
            gate
            for gate, jobs in ((self.reading, self.fetches), (self.writing, self.writes))
            if gate.probe_due(now) and not any(job.abandoned for job in jobs)
        ]:
            self._probed = due
            self._give(Job(self.tier.probe, self._tried))

    def _give(self, job: Job) -> None:
        self._keeping = job
        self._keeper.give(job)

    def errand(self, work: Callable[[Tier], ForgetResult], *, writes: bool = False) -> Errand:
        """Have the keeper do ``work`` as soon as it is free; when that fails or hangs, nothing is written for a while.

        A tier that does not work is given none, and one that is only read none that ``writes``.
        """
        refused = why_left_alone(self.writing) or why_left_alone(self.reading)
        if writes and self.config.write == "never":
            refused = "this node only reads it (write=never)"
        errand = Errand(partial(work, self.tier), self._did_errand)
        if refused:
            errand.set_exception(TierFailed(refused))
        else:
            self._errands.append(errand)
            self.keep(self._clock())
        return errand

    def _did_errand(self, errand: Job) -> None:
        now = self._clock()
        if reason := self._kept(errand):
            self.cut(reason, now, self.writing)
        self.keep(now)

    def look_soon(self) -> None:
        self._next_look = self._clock()

    def _kept(self, job: Job) -> str:
        """The keeper ended ``job``; what was wrong.  What took too long counts as failed, whatever came of it."""
        self._keeping = None
        return "a look at what is there took too long" if job.abandoned else error_text(job.exception())

    def _tried(self, job: Job) -> None:
        reason, now = self._kept(job), self._clock()
        works = [gate for gate in self._probed if gate.probed(reason, now)]
        if self.reading in works:
            self.speed.forget()
        if works:
            direction = " and ".join(gate.direction for gate in works)
            _log.info("a tier works again", tier=self.config.name, direction=direction)

    def _looked(self, job: Job) -> None:
        reason, now = self._kept(job), self._clock()
        if reason:
            self.cut(reason, now, self.reading, self.writing)
            return
        pause = self.config.refresh_seconds * (1 if self.missed else IDLE_FACTOR)
        self.missed = False
        self._next_look = now + pause if self.tier.scanned else now

    def miss(self, now: float) -> None:
        """Something was asked for that the tier does not know: another node may have written it."""
        if not self.missed:
            self.missed = True
            self._next_look = min(self._next_look, now + self.config.refresh_seconds)

    @property
    def reads(self) -> bool:
        return self.reading.open and not self.config.local_only

    @property
    def remote(self) -> bool:
        """Whether what it has comes over a network."""
        return self.config.kind != "dir"

    def wish(self, pages: Sequence[Page], write: ClusterWrite) -> None:
        """The writer of ``pages`` wishes that a cluster gets them as ``write`` says."""
        if write and self.config.kind == "mooncake":
            self.wishes.add(write)
            for page in pages:
                page.cluster_write = write

    def writes_when(self, *when: str) -> bool:
        """Whether there may be pages that are written to it then."""
        own = self.config.write
        return own != "never" and (own in when or any(one in when for one in self.wishes))

    def due(self, pages: Sequence[Page], *when: str) -> Sequence[Page]:
        """Those of ``pages`` that are written to it then; what only reads a tier is wished for in vain."""
        if not self.writes_when(*when):
            return ()
        return [page for page in pages if (page.cluster_write or self.config.write) in when] if self.wishes else pages

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self.tier.holds(namespace, keys)

    # Looking in, ending

    def figures(self, now: float) -> dict[str, Any]:
        line = self.speed.fetched.line(now)
        return {
            "name": self.config.name,
            "reading": self.reading.open,
            "writing": self.writing.open,
            "reason": self.reading.reason or self.writing.reason,
            "cuts": self.reading.cuts + self.writing.cuts,
            "queued_bytes": self.write_back.size,
            "pages_dropped": self.write_back.dropped,
            "fetching": len(self.fetches),
            "fetches_too_dear": self.speed.reluctance.refused,
            "fetch_seconds": line.fixed if line is not None else 0.0,
            "fetch_bytes_per_second": 1 / line.per_unit if line is not None and line.per_unit > 0 else 0.0,
            **self.counts,
            **{f"tier_{name}": value for name, value in self.tier.figures().items()},
        }

    def close(self, until: float) -> None:
        if self.writing.open and self._keeping is None:
            job = Job(self.tier.close, lambda _: None)
            self._keeper.give(job)
            self._keeper.wait(job, until)
        for crew in (self.readers, self.writers, self.askers, self._keeper):
            if crew is not None:
                crew.dismiss()


def error_text(error: BaseException | None) -> str:
    """What went wrong, in a sentence; empty when nothing did."""
    if error is None:
        return ""
    if not isinstance(error, TierFailed):
        _log.error("a defect in a tier", exc_info=error)
        return f"a defect of EMS: {type(error).__name__}: {error}"
    return str(error)


def why_left_alone(gate: Gate) -> str:
    return "" if gate.open else f"it is left alone because it does not work: {gate.reason}"


def look(tier: Tier) -> ForgetResult:
    """Have ``tier`` see what is there; with ``more`` it has not seen all yet."""
    tier.maintain()
    return ForgetResult(more=not tier.scanned)
