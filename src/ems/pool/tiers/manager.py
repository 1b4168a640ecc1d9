"""Carries pages between a node's segments and its tiers: the shell around :mod:`ems.pool.movement`.

It runs on the node's loop and does no I/O there: threads read straight into reserved slots and write straight from
leased ones.  What always holds: a page that is being fetched is reserved by an owner of its own and becomes readable
only when its tier has proven its bytes; a slot is given to nobody else while a thread may still write into it; a page
stays in memory while it is being written; whatever a tier does, no client waits for it longer than it wants to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol, cast

import structlog

from ems.config import MIB
from ems.errors import StaleReference
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.writing import Reserved
from ems.pool.keys import NO_PARENT, Tail, directories_of, masked
from ems.pool.layout import PageRef, writer_of
from ems.pool.media import medium_of
from ems.pool.movement.promotion import Portion, Promotions
from ems.pool.movement.tier_events import TierEvents
from ems.pool.movement.write_back import Unit
from ems.pool.names import tenant_of
from ems.pool.pages import ClusterWrite, Page
from ems.pool.segments.arena import Arena
from ems.pool.tiers.answers import Asking, Below, ForgetRequest, Holding, KeyRun, Outcome, Waking
from ems.pool.tiers.copying_ahead import CopyingAhead
from ems.pool.tiers.offering_again import OfferingAgain
from ems.pool.tiers.pass_through import Leaving
from ems.pool.tiers.seam import AskedTier, Tier
from ems.pool.tiers.settings import TierConfig
from ems.pool.tiers.threads import Job, NewThreadPool, ThreadPool
from ems.pool.tiers.tier_state import Errand, TierState, error_text, look, why_left_alone

TICK_SECONDS = 0.1
LIST_WORK = 64
"""What a question for a list counts as, in keys."""
MOST_DUE = 256
"""Tails, of up to 64 KiB each, that are looked up again when what was asked already has its answer."""
MOST_WAITING = 64
"""Lookups that wait for answers of tiers."""
CROWDED_SECONDS = 1.0
"""How long nothing more is wanted for a namespace after memory had no room for a page of it."""
PORTION = 8 * MIB
"""Bytes that are fetched in one go: small enough that the first blocks of a long prompt are there early."""
CLUSTER_PORTION = 64 * MIB
"""The same from a cluster, where a call costs as much as many pages: now and then one waits for tens of ms."""
MOST_UNDER_WAY = 256 * MIB
SHARE_UNDER_WAY = 8
"""At most one in so many bytes of memory is being fetched into."""
RUNS = 64
"""Changes from one tier to another that one lookup follows."""
CLEANED = 256
"""Pages that are looked at in one go because they would leave memory soon."""
CLEAN_PAGES = 16
"""Saved pages after which that is done without waiting for the next tick."""
CLEANED_FOR = 64
"""Saved pages for which it is done once: what would leave is walked through faster than it can leave."""
SETTLED = frozenset({Outcome.DONE, Outcome.CORRUPT, Outcome.WRONG_SIZE, Outcome.WRONG_KEY, Outcome.NO_ROOM})
"""What becomes of a page that is of no use to offer again while nobody uses it."""
THERE = frozenset({Outcome.DONE, Outcome.PRESENT})
HEARD_SECONDS = 600.0
"""How long a page counts as being in a tier that has to be asked, when nobody hears of it again."""
FLUSH_SECONDS = 1.5
"""How long a node that stops goes on writing what waits."""

NOBODY = Asking()

_log = structlog.get_logger("ems.tier")


class TierHost(Protocol):
    """What the carrier needs of its node."""

    loop: asyncio.AbstractEventLoop
    core: PoolCore
    arena: Arena

    def promise(
        self, client_id: int, namespace: int, parent: bytes, keys: list[bytes], tails: Sequence[Tail | None] = ()
    ) -> Reserved: ...

    def publish(self, client_id: int, reservation: int, checksums: dict[int, int]) -> None: ...


class TierManager:
    """The tiers of one node, the fastest first."""

    def __init__(
        self,
        host: TierHost,
        tiers: Sequence[tuple[TierConfig, Tier]],
        clock: Callable[[], float] = time.monotonic,
        crew: NewThreadPool = ThreadPool,
    ) -> None:
        self._host = host
        self._clock = clock
        self._closed = False
        self.states = [TierState(number, *one, self._tell, clock, crew) for number, one in enumerate(tiers)]
        self._again = [OfferingAgain(state, host.core, self._offer_again) for state in self.states if state.tier.asks]
        self._ahead = {
            state.number: CopyingAhead(
                state,
                host.core,
                self._question,
                self.bring,
                partial(self._fetches_nothing, state),
                partial(self._may_move, state),
                clock,
            )
            for state in self.states
            if state.tier.asks and state.config.copies_ahead
        }
        limit = min(MOST_UNDER_WAY, sum(host.arena.sizes) // SHARE_UNDER_WAY)
        self._promotions = Promotions(
            limit, lambda tier: min(self._portion(tier), limit) or 1, lambda one: tenant_of(host.core.named(one)[0])
        )
        self._client_ids = itertools.count(-1, -1)
        self._writer = next(self._client_ids)
        """The owner that stands for what is being written to tiers; those of pages being fetched follow."""
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._saved = 0
        """Pages that were saved since what would leave memory was looked at."""
        self._crowded: dict[int, float] = {}
        """Since when memory has no room for pages of a namespace: nobody is told to wait for them."""
        self._promoting: dict[tuple[int, bytes], tuple[int, int]] = {}
        """Keys that are being fetched, each by an owner, from a tier."""
        media = {medium_of(state.config.kind) for state in self.states}
        self._events = {medium: TierEvents(host.core.changes, medium, partial(self._held, medium)) for medium in media}
        self._held_back: list[Callable[[str], bool]] = []
        """Which namespaces are being cleared: nothing of them goes up or down meanwhile."""
        self._due: dict[tuple[int, str, bytes], Callable[[], object]] = {}
        """Who looks up a tail again when what is under way has told of its directory; others do so by themselves."""
        self._waiting: set[Callable[[], None]] = set()
        """Who is to be told when a tier has said what it has."""

    def _tell(self, call: Callable[[], None]) -> None:
        if not self._closed:
            try:
                self._host.loop.call_soon_threadsafe(call)
            except RuntimeError:  # the loop ended in this very moment, and with it all that this call was about
                return

    def start(self) -> None:
        if self.states:
            self._tick()

    def _moves(self, name: str, *, local_only: bool = False) -> Sequence[TierState]:
        """The tiers that pages of the namespace ``name`` may come from and go to now."""
        states = () if any(closed(name) for closed in self._held_back) else self.states
        return [state for state in states if not state.remote] if local_only else states

    def _may_move(self, state: TierState, name: str) -> bool:
        return state in self._moves(name)

    # What the node tells

    def page_size(self, name: str) -> int:
        held = (state.tier.namespaces().get(name) for state in self.states)
        return next((one.page_size for one in held if one is not None), 0)

    def committed(self, namespace: int, pages: Sequence[Page], cluster_write: ClusterWrite = "") -> None:
        """Engines saved ``pages``, which a cluster is to get as ``cluster_write`` says."""
        if self.states:
            for state in self.states:
                state.wish(pages, cluster_write)
            if self._ahead:
                self._discard_copies(self._host.core.named(namespace)[0], [page.key for page in pages])
                for page in pages:
                    page.untold = True
            self._saved += len(pages)
            self.offer(namespace, pages)

    def looked_up(self, namespace: int, keys: list[bytes], found: int, asking: Asking = NOBODY) -> Below:
        """``keys`` were asked for and the first ``found`` are present: fetch what follows, as far as any tier has it.

        Returns how many keys after the present ones come up, without a gap, from tiers that are worth asking.
        """
        if not self.states:
            return Below(0, asked=False)
        return self._want(namespace, keys, found, asking, urgent=True)[1]

    def prefetch(self, namespace: int, keys: list[bytes], asking: Asking = NOBODY) -> int:
        """``keys`` will be needed soon; returns how many are in memory or on their way there.

        Raises StaleReference: the namespace is not open.
        """
        return self._want(namespace, keys, 0, asking, urgent=False)[0]

    def looked_up_tail(
        self, namespace: int, tail: Tail, shared: int, masks: bytes = b"", asking: Asking = NOBODY
    ) -> Below:
        """A page that shares ``shared`` tokens with ``tail`` is present; whether a better one is on its way now.

        With it come the other pages of its chunk, by ``masks`` of their keys.
        """
        name = self._host.core.named(namespace)[0]
        again = partial(self.looked_up_tail, namespace, tail, shared, masks, asking)
        for state in self._moves(name, local_only=asking.local_only):
            if state.reads and state.tier.asks and self._asks_tails(state, name, tail, again, asking):
                return Below(1, asked=True)
            best = state.tier.find_tail(name, tail) if state.reads else None
            if best is None or best.tail.common(tail.tokens) <= shared:
                continue
            pages = [(key, self._host.core.page(namespace, key)) for key in masked(best.tail.key, masks)]
            if missing := [key for key, page in pages if page is None]:
                return Below(int(self._ask(state, namespace, best.parent, missing, urgent=True)), asked=False)
            if any(not page.present and (namespace, key) in self._promoting for key, page in pages if page is not None):
                return Below(1, asked=False)
        return Below(0, asked=False)

    def _ask(self, state: TierState, namespace: int, parent: bytes, keys: list[bytes], *, urgent: bool) -> bool:
        """Have ``keys``, blocks behind ``parent``, fetched from ``state``; False when too much waits."""
        name, page_size = self._host.core.named(namespace)
        self._discard_copies(name, keys)
        self._pump_soon()
        return self._promotions.ask(state.number, namespace, page_size, parent, keys, self._clock(), urgent=urgent)

    def _discard_copies(self, name: str, keys: Sequence[bytes]) -> None:
        for ahead in self._ahead.values():
            ahead.discard(name, keys)

    def _fetches_nothing(self, state: TierState) -> bool:
        return not self._promotions.waiting(state.number) and not self._promotions.under_way

    def _want(
        self, namespace: int, keys: list[bytes], start: int, asking: Asking, *, urgent: bool
    ) -> tuple[int, Below]:
        """How many ``keys`` from ``start`` on are in memory or on their way, and how many of these come from tiers."""
        core, at, promoting = self._host.core, start, 0
        name, page_size = core.named(namespace)
        states = self._moves(name, local_only=asking.local_only)
        for _ in range(RUNS):
            # What is fetched from elsewhere for somebody else is no business of who reads this host only.
            while (
                at < len(keys)
                and (page := core.page(namespace, keys[at])) is not None
                and not (asking.local_only and self._is_remote(namespace, keys[at]))
            ):
                promoting += not page.present and (namespace, keys[at]) in self._promoting
                at += 1
            if at == len(keys) or self._is_crowded(namespace):
                break
            parent, now = keys[at - 1] if at else bytes(NO_PARENT), self._clock()
            for state in states:
                count = state.tier.holds(name, keys[at:]) if state.reads else 0
                if not count and state.reads and state.tier.asks:
                    again = partial(self._want, namespace, keys, at, asking, urgent=urgent)
                    if maybe := self._asks(state, name, keys, at, again, asking):
                        return at - start, Below(promoting + maybe, asked=True)
                if count:
                    self._events_of(state).seen(name, keys[at : at + count], now)
                if not count:
                    state.miss(now)
                elif self._is_worth(state, count * page_size, asking.computing * count, now) and self._ask(
                    state, namespace, parent, keys[at : at + count], urgent=urgent
                ):
                    break
            else:
                break
            at += count
            promoting += count
        return at - start, Below(promoting, asked=False)

    # What others are told of the tiers

    def _events_of(self, state: TierState) -> TierEvents:
        return self._events[medium_of(state.config.kind)]

    def _held(self, medium: str, name: str, key: bytes, heard: float) -> bool:
        """Whether a tier of ``medium`` has a page of which was last ``heard`` then, and may be read."""
        now = self._clock()
        return any(
            state.tier.holds(name, [key]) > 0 or (state.tier.asks and now < heard + HEARD_SECONDS)
            for state in self.states
            if state.reads and medium_of(state.config.kind) == medium
        )

    def _is_remote(self, namespace: int, key: bytes) -> bool:
        """Whether the page is being fetched over a network."""
        fetched = self._promoting.get((namespace, key))
        return fetched is not None and self.states[fetched[1]].remote

    # Tiers that have to be asked what they have

    def _asks(
        self, state: TierState, name: str, keys: list[bytes], first: int, again: Callable[[], object], asking: Asking
    ) -> int:
        """How many ``keys`` from ``first`` may turn out to be in ``state``; what is wanted is wanted ``again`` then."""
        tier = cast("AskedTier", state.tier)
        if not state.questions.has_room(asking.party):
            return 0
        unknown = tier.unknown(name, keys[first:], directories_of(asking.directories, len(keys), first))
        if unknown.keys:
            answered = partial(self._answered, state, name, unknown.keys, unknown.directories, again)
            work = len(keys) + (LIST_WORK if unknown.directories else 0)  # all of them are kept until it is answered
            ask = partial(tier.ask, name, unknown.keys, unknown.directories)
            self._question(state, ask, answered, asking.party, work)
        return unknown.maybe

    def _answered(
        self,
        state: TierState,
        name: str,
        keys: Sequence[bytes],
        directories: Sequence[bytes],
        again: Callable[[], object],
    ) -> None:
        self._events_of(state).missed(name, keys)
        self._told_of(state, name, directories, again)

    def _told_of(self, state: TierState, name: str, directories: Sequence[bytes], again: Callable[[], object]) -> None:
        """It was asked for tails of ``directories``: look ``again``, also for who looked meanwhile."""
        due = [self._due.pop((state.number, name, directory), None) for directory in directories]
        for one in (again, *due):
            if one is not None:
                with contextlib.suppress(StaleReference):  # the namespace is gone
                    one()

    def _asks_tails(self, state: TierState, name: str, tail: Tail, again: Callable[[], object], asking: Asking) -> bool:
        """Whether a tail may turn out to be in ``state``; it is looked up ``again`` then."""
        tier = cast("AskedTier", state.tier)
        if not state.questions.has_room(asking.party):
            return False
        maybe, unknown = tier.unknown_tail(name, tail)
        if unknown:
            told = partial(self._told_of, state, name, [tail.directory], again)
            self._question(state, partial(tier.ask_tails, name, tail.directory), told, asking.party, LIST_WORK)
        elif maybe and len(self._due) < MOST_DUE:
            self._due[state.number, name, tail.directory] = again
        return maybe

    def _question(
        self, state: TierState, ask: Callable[[], None], again: Callable[[], object], party: str = "", keys: int = 0
    ) -> None:
        state.questions.add(Job(ask, partial(self._learned, state, again)), party, keys)
        self._ask_next(state)

    def _ask_next(self, state: TierState) -> None:
        while (question := state.questions.next()) is not None:
            assert state.askers is not None
            state.askers.give(question)

    def _learned(self, state: TierState, again: Callable[[], object], job: Job) -> None:
        state.questions.ended(job)
        if self._closed:
            return
        if (failure := job.exception()) is not None:
            self._cut_reading(state, error_text(failure), self._clock())
        self._ask_next(state)
        with contextlib.suppress(StaleReference):  # the namespace is gone
            again()
        for tell in list(self._waiting):
            tell()

    def learns(self, until: float) -> Waking | None:
        """Wakes who waits for a tier that was asked what it has, ``until`` then at most.

        None when that is over, or many wait: each is woken by every answer.
        """
        seconds = until - self._clock()
        if seconds <= 0 or len(self._waiting) >= MOST_WAITING:
            return None

        def wait(wake: Callable[[], None]) -> None:
            def tell() -> None:
                timer.cancel()
                self._waiting.discard(tell)
                wake()

            timer = self._host.loop.call_later(seconds, tell)
            self._waiting.add(tell)

        return wait

    def _is_crowded(self, namespace: int) -> bool:
        since = self._crowded.get(namespace)
        return since is not None and 0 <= self._clock() - since < CROWDED_SECONDS

    def _is_worth(self, state: TierState, size: int, computing: float, now: float) -> bool:
        before = self._promotions.waiting(state.number, urgent=True) + self._promotions.under_way
        return state.speed.worth(state.speed.expected(size, before, self._portion(state.number), now), computing)

    def _portion(self, tier: int) -> int:
        return CLUSTER_PORTION if self.states[tier].tier.asks else PORTION

    # Time

    def _tick(self) -> None:
        # First: whatever goes wrong below, time goes on.
        self._timer = self._host.loop.call_later(TICK_SECONDS, self._tick)
        now = self._clock()
        for state in self.states:
            for job in state.hung(now):
                self._hangs(state, job, now)
            state.keep(now)
        for again in self._again:
            again.step()
        for ahead in self._ahead.values():
            ahead.step()
        for events in self._events.values():
            events.look()
        self._clean()
        self._pump()

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._host.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._closed:
            return
        now = self._clock()
        if self._saved >= CLEAN_PAGES:
            self._clean()
        while (portion := self._promotions.next(now)) is not None:
            self._fetch(portion)
        for state in self.states:
            while state.writing.open and len(state.writes) < state.most_writers:
                units = state.write_back.take(now)
                if not units:
                    break
                self._write(state, units)

    def _hangs(self, state: TierState, job: Job, now: float) -> None:
        job.abandoned = True
        if job in state.writes:
            self._cut_writing(state, f"a write took longer than {state.config.timeout:.0f} s", now)
            return
        client_id, portion = state.fetches[job]
        # Its thread may still write into the slots, so they rest until it comes back, however late.
        self._host.core.disconnect(client_id, now, alive=True)
        self._ended(client_id, portion)
        self._cut_reading(state, f"a read took longer than {state.config.timeout:.0f} s", now)

    # Fetching

    def _fetch(self, portion: Portion) -> None:
        state = self.states[portion.tier]
        core, client_id, keys = self._host.core, next(self._client_ids), list(portion.keys)
        name, size = core.named(portion.namespace)
        space, ahead = core.namespaces.opened(portion.namespace), self._ahead.get(portion.tier)
        used, is_copy = space.last_used, ahead is not None and ahead.is_copy(name, keys[0])
        if is_copy and not (keys := keys[: core.reclaimer.idle_room(space)]):
            self._promotions.ended(portion)
            return
        try:
            tails = state.tier.tails(name, keys)
            reserved = self._host.promise(client_id, portion.namespace, portion.parent, keys, tails)
        except OSError as error:
            _log.warning("memory could not be prepared for pages of a tier", tier=state.config.name, reason=str(error))
            core.disconnect(client_id, self._clock(), alive=False)
            self._promotions.ended(portion)
            return
        if is_copy:
            space.last_used = used  # nobody asked for it
        if len(reserved.granted) < len(keys) and any(core.page(portion.namespace, key) is None for key in keys):
            if not is_copy:
                self._promotions.no_room(portion)
            if not is_copy and not reserved.granted:
                self._crowded[portion.namespace] = self._clock()
        if not reserved.granted:
            self._promotions.ended(portion)
            return
        self._crowded.pop(portion.namespace, None)
        arena = self._host.arena
        wanted = [(page.key, arena.place(PageRef.unpack(page.ref), size)) for page in reserved.granted]
        positions = [keys.index(page.key) for page in reserved.granted]
        ended = partial(self._fetched, state, reserved.reservation, positions)
        job = Job(partial(state.tier.read, name, wanted), ended)
        state.fetches[job] = (client_id, portion)
        self._promoting.update(((portion.namespace, page.key), (client_id, state.number)) for page in reserved.granted)
        state.readers.give(job)

    def _fetched(self, state: TierState, reservation: int, positions: list[int], job: Job) -> None:
        client_id, portion = state.fetches.pop(job)
        if self._closed:
            return
        now = self._clock()
        if job.abandoned:
            self._host.core.deferred.stopped(writer_of(client_id))
            return
        self._ended(client_id, portion)
        failure = job.exception()
        outcomes, checksums = ([], []) if failure is not None else job.result()
        good = {
            position: checksum
            for position, outcome, checksum in zip(positions, outcomes, checksums, strict=False)
            if outcome is Outcome.DONE
        }
        if good:
            try:
                self._host.publish(client_id, reservation, good)
            except StaleReference:  # a segment of it was given up meanwhile
                good.clear()
        if good:
            state.speed.fetched.add(len(good) * (portion.size // len(portion.keys)), job.seconds, now)
        if len(good) < len(positions):
            with contextlib.suppress(StaleReference):  # a segment of it was given up meanwhile
                self._host.core.writing.abort(client_id, reservation)
        state.counts["pages_fetched"] += len(good)
        if good and (ahead := self._ahead.get(portion.tier)) is not None:
            ahead.arrived(self._host.core.named(portion.namespace)[0], [portion.keys[at] for at in good])
        state.counts["fetch_misses"] += outcomes.count(Outcome.MISSING)
        state.counts["fetch_corrupt"] += sum(one in {Outcome.CORRUPT, Outcome.WRONG_SIZE} for one in outcomes)
        with contextlib.suppress(StaleReference):  # the namespace is gone
            absent = [portion.keys[at] for at in positions if at not in good]
            self._events_of(state).missed(self._host.core.named(portion.namespace)[0], absent)
        if failure is not None:
            self._cut_reading(state, error_text(failure), now)
        self._pump_soon()

    def _cut_reading(self, state: TierState, reason: str, now: float) -> None:
        state.cut(reason, now, state.reading)
        self._promotions.cut(state.number)
        state.questions.drop()
        self._due = {place: again for place, again in self._due.items() if place[0] != state.number}
        for job, (client_id, portion) in list(state.fetches.items()):
            if not job.abandoned and job.cancel():
                del state.fetches[job]
                self._ended(client_id, portion)
                self._host.core.disconnect(client_id, now, alive=False)

    def _ended(self, client_id: int, portion: Portion) -> None:
        self._promotions.ended(portion)
        for name in ((portion.namespace, key) for key in portion.keys):
            # Others may fetch some of the keys, which were theirs already.
            if self._promoting.get(name) == (client_id, portion.tier):
                del self._promoting[name]

    # Writing

    def _offer_again(self, state: TierState, namespace: int, pages: Sequence[Page]) -> None:
        """The tier may have lost what it is believed to have."""
        self._offer(state, namespace, pages, again=True)

    def _offer(self, state: TierState, namespace: int, pages: Sequence[Page], *, again: bool = False) -> None:
        if not state.writing.open:
            state.counts["not_offered"] += len(pages)
            return
        core = self._host.core
        name, size = core.named(namespace)
        if not self._may_move(state, name):
            return
        keys = [page.key for page in pages]
        new = keys if again else state.tier.lacks(name, keys)
        now = self._clock()
        for portion in state.write_back.portions(namespace, new, size):
            lease, held = core.reading.hold(self._writer, namespace, portion)
            if held:
                state.write_back.add(Unit(namespace, lease, tuple(page.key for page in held), len(held) * size, now))

    def _clean(self) -> None:
        """Offer what would leave memory soon and is in no tier yet."""
        self._saved = max(self._saved - CLEANED_FOR, 0)
        core = self._host.core
        for state in self.states:
            if state.writes_when("on_save", "on_evict") and state.writing.open:
                for namespace, order in core.reclaimer.leaving_soon(CLEANED):
                    # As far as there is room: the walk stays where it is while the queue is full.
                    most = min(CLEANED, state.write_back.room(core.named(namespace)[1]))
                    pages = state.pre_eviction.next(namespace, order, most)
                    here = [page for page in pages if core.page(namespace, page.key) is page]
                    self._offer(state, namespace, state.due(here, "on_save", "on_evict"))
        if self._saved >= CLEAN_PAGES:
            self._pump_soon()

    def leaving(self) -> tuple[int, int, list[str]]:
        """Of what goes to other hosts before this one may: pages that wait, pages ever given, and why no more are."""
        remote = [one for one in self.states if one.tier.asks]
        out = [f"{one.config.name}: {one.writing.reason}" for one in remote if not one.writing.open]
        return sum(one.waiting for one in self._again), sum(one.counts["pages_written"] for one in remote), out

    def _write(self, state: TierState, units: list[Unit]) -> None:
        core, arena = self._host.core, self._host.arena
        name, size = core.named(units[0].namespace)
        pages, uses, untold = [], [], []
        # Not by key: another page may have the key by now, whose bytes are not written yet.
        for page in (page for unit in units for page in core.leases.pages(self._writer, unit.lease)):
            parent = page.parent.key if page.parent is not None else bytes(NO_PARENT)
            ref = PageRef.unpack(page.ref)
            uses.append((page.ref, page.used))
            if page.untold:
                untold.append(page)
            pages.append(Leaving(page.key, parent, page.tail, arena.place(ref, size), arena.headers.checksum(ref)))
        if not pages:
            self._let_go(state, units)
            return
        job = Job(partial(state.tier.write, name, pages), partial(self._written, state, name, pages, uses, untold))
        state.writes[job] = units
        state.writers.give(job)

    def _written(
        self,
        state: TierState,
        name: str,
        pages: Sequence[Leaving],
        uses: list[tuple[bytes, float]],
        untold: Sequence[Page],
        job: Job,
    ) -> None:
        units = state.writes.pop(job)
        if self._closed:
            return
        self._let_go(state, units)
        if failure := job.exception():
            state.counts["write_failures"] += sum(len(unit.keys) for unit in units)
            self._cut_writing(state, error_text(failure), self._clock())
        else:
            outcomes = job.result()
            state.counts["pages_written"] += outcomes.count(Outcome.DONE)
            state.counts["write_corrupt"] += outcomes.count(Outcome.CORRUPT)
            settled = [use for use, outcome in zip(uses, outcomes, strict=True) if outcome in SETTLED]
            there = [page for page, outcome in zip(pages, outcomes, strict=True) if outcome in THERE]
            if state.reads:
                self._events_of(state).seen(name, [page.key for page in there], self._clock())
            state.pre_eviction.settled(units[0].namespace, settled)
            if (ahead := self._ahead.get(state.number)) is not None:
                done = {page.key for page in there}
                told = {page.key: page for page in untold if page.key in done}
                for page in told.values():
                    page.untold = False
                ahead.written(name, [page for page in there if page.key in told])
        self._pump_soon()

    def _let_go(self, state: TierState, units: list[Unit]) -> None:
        state.write_back.ended(units)
        for unit in units:
            self._host.core.reading.release(self._writer, unit.lease)

    def _cut_writing(self, state: TierState, reason: str, now: float) -> None:
        state.cut(reason, now, state.writing)
        self._let_go(state, state.write_back.give_back_all())

    # For an administrator, to whom tiers have numbers, from the top

    def holdings(self) -> list[tuple[str, dict[str, Holding]]]:
        return [(state.config.name, state.tier.namespaces()) for state in self.states]

    def left_alone(self, tier: int) -> set[str]:
        return self.states[tier].tier.left_alone()

    def holders(self, name: str, key: bytes) -> list[str]:
        return [state.config.name for state in self.states if state.tier.holds(name, [key])]

    def recent(self, tier: int, name: str) -> Iterator[KeyRun]:
        return self.states[tier].tier.recent(name)

    def why_not_read(self, tier: int) -> str:
        return why_left_alone(self.states[tier].reading)

    def bring(self, tier: int, namespace: int, run: KeyRun) -> bool:
        """Fetch ``run``, whose prefix is in memory or on its way; False when too much waits, or it may not come now."""
        state = self.states[tier]
        if not self._may_move(state, self._host.core.named(namespace)[0]) or not state.reads:
            return False
        return self._ask(state, namespace, run.parent, run.keys, urgent=False)

    def comes(self, namespace: int, keys: Sequence[bytes]) -> bool:
        """Whether any of ``keys``, which were asked for in one go, is still on its way."""
        return any((namespace, key) in self._promoting or self._promotions.wants(namespace, key) for key in keys)

    def hold_back(self, matches: Callable[[str], bool]) -> Callable[[], None]:
        """Nothing of the namespaces that are ``matches`` goes up or down, until what is returned is called."""
        closed = cache(matches)
        self._held_back.append(closed)
        for ahead in self._ahead.values():
            ahead.clear(closed)
        return partial(self._held_back.remove, closed)

    def take_back(self, namespace: int, wanted: Callable[[Page], bool]) -> None:
        """Pages of ``namespace`` that are ``wanted`` are neither written nor fetched, if that was not begun."""
        self._promotions.forget(namespace)
        for state in self.states:
            units = state.write_back.give_back(namespace)
            kept = [
                page
                for unit in units
                for page in self._host.core.leases.pages(self._writer, unit.lease)
                if not wanted(page)
            ]
            self._let_go(state, units)
            self._offer(state, namespace, kept)

    def offer(self, namespace: int, pages: Sequence[Page]) -> None:
        """Have ``pages`` written, which a clearing spared or held up."""
        self._offer_when("on_save", namespace, pages)
        self._pump_soon()

    def used(self, namespace: int, pages: Sequence[Page]) -> None:
        """Engines load ``pages``, which were saved before."""
        if self._ahead:
            name = self._host.core.named(namespace)[0]
            for ahead in self._ahead.values():
                ahead.used(name, pages)
        if self._offer_when("on_second_use", namespace, pages):
            self._pump_soon()

    def _offer_when(self, write: str, namespace: int, pages: Sequence[Page]) -> bool:
        """Whether any tier is written to in that case."""
        states = [state for state in self.states if state.writes_when(write)]
        for state in states:
            self._offer(state, namespace, state.due(pages, write))
        return bool(states)

    def look(self, tier: int) -> Errand:
        return self.states[tier].errand(look)

    def forget(self, tier: int, matches: ForgetRequest, *, dry_run: bool) -> Errand:
        state = self.states[tier]
        if state.tier.asks and not dry_run:
            self._events_of(state).forget(matches.namespace)
        return state.errand(lambda one: one.forget(matches, dry_run=dry_run), writes=True)

    def settle(self, tier: int) -> None:
        self.states[tier].look_soon()

    # Looking in, ending

    def figures(self) -> list[dict[str, Any]]:
        now = self._clock()
        waiting = self._promotions.waiting
        return [state.figures(now) | {"waiting_bytes": waiting(state.number)} for state in self.states]

    def close(self) -> None:
        """Write what waits, for a bounded time, and let go of everything."""
        if self._timer is not None:
            self._timer.cancel()
        until = self._clock() + FLUSH_SECONDS
        jobs: list[tuple[TierState, Job]] = []
        for state in self.states:
            while state.writing.open and (units := state.write_back.take(self._clock(), hurry=True)):
                self._write(state, units)
            jobs += [(state, job) for job in state.writes]
            for fetch in state.fetches:
                fetch.cancel()
        self._closed = True
        for state, job in jobs:
            state.writers.wait(job, until)
        for state in self.states:
            state.close(until)
        if not all(job.done() for _, job in jobs):
            _log.warning("a tier did not take all pages before the node stopped")
