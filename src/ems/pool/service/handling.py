"""The one entry of a node's brain: what a greeted client asks, and the time; what is to be done for it, and the answer.

What always holds: whatever a request says, it changes nothing of others; a refusal is an error of :mod:`ems.errors`;
what takes long pauses after each step of bounded work, and may find things changed then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import structlog

from ems.errors import PoolRestarting, StaleReference
from ems.histogram import Histogram
from ems.pool.core.writing import Begun
from ems.pool.keys import KEY_BYTES, Tail, cut, split_keys
from ems.pool.layout import REF_BYTES, unpack_refs
from ems.pool.names import refuse_marked
from ems.pool.pages import Outcome, packed_refs
from ems.pool.protocol import messages
from ems.pool.protocol.acts import Acts, Follow, List, Show, Upgrade
from ems.pool.protocol.limits import MAX_SHARDS
from ems.pool.reasons.words import Reason
from ems.pool.segments.reader import LOOKED_AT_ONCE
from ems.pool.service.storing import Applier, Steps, Storing
from ems.pool.tiers.answers import Asking, Below, revised, why

if TYPE_CHECKING:
    from ems.pool.core.pool_core import PoolCore
    from ems.pool.core.reading import Found
    from ems.pool.pages import Page
    from ems.pool.tenants.request_filter import TenantRequestFilter
    from ems.pool.tiers.manager import TierManager

STEP = 256
"""Work of one step, in keys: that of a request which takes longer is done in steps."""
MOST_AT_ONCE = 16 * STEP
"""Work that a request of any length may be before it goes in steps."""
MOST_HELD = 4 * STEP
"""Keys of a lookup that waits for answers of tiers: it looks again after each of them."""
SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1, 1.0)
BYTES = tuple(float(4**power) for power in range(6, 17))
"""From 4 KiB to 4 GiB."""
_GRANTED, _NO_SPACE = bytes([Outcome.GRANTED]), bytes([Outcome.NO_SPACE])
_REFUSALS = (Outcome.NO_SPACE, Outcome.NOT_TOUCHED, Outcome.OVER_SHARE)
_GAP = bytes([Reason.GAP.code])
_Verb = Callable[[int, Any, float], "messages.Answer | Steps[Any] | None"]

_log = structlog.get_logger("ems.node")


class Host(Protocol):
    """What the rest of the node knows and does at once; ``Clients`` there says what each of it means."""

    @property
    def open(self) -> bool: ...

    @property
    def restarting(self) -> bool: ...

    def segment_size(self, segment: int) -> int: ...

    def figures(self, *, own: bool) -> dict[str, Any]: ...

    def administer(self, client_id: int, act: Acts, *, dry_run: bool) -> dict[str, Any]: ...

    def party(self, client_id: int) -> str: ...

    def request_filter(self, client_id: int, request: messages.Request) -> TenantRequestFilter | None: ...


class Measured:
    """Histograms of one node: seconds of each of ``verbs``, bytes of each commit and of each lookup with a lease."""

    def __init__(self, verbs: Iterable[type]) -> None:
        self.seconds = {verb: Histogram(SECONDS) for verb in verbs}
        self.saved_bytes = Histogram(BYTES)
        self.loaded_bytes = Histogram(BYTES)


class RequestHandler:
    """Every verb of a greeted client."""

    def __init__(self, core: PoolCore, storing: Storing, applier: Applier, below: TierManager, host: Host) -> None:
        self._core = core
        self._storing = storing
        self._applier = applier
        self._below = below
        self._host = host
        self._verbs: dict[type, _Verb] = {
            messages.Lookup: self._lookup,
            messages.Release: self._release,
            messages.Reserve: self._reserve,
            messages.Commit: self._commit,
            messages.Abort: self._abort,
            messages.StillWriting: self._still_writing,
            messages.Open: self._open,
            messages.Attach: self._attach,
            messages.Stats: self._stats,
            messages.Changes: self._changes,
            messages.Prefetch: self._prefetch,
            messages.Describe: self._describe,
            messages.Miss: self._miss,
            messages.Explain: self._explain,
            messages.Corrupt: self._corrupt,
            messages.Announce: self._announce,
            messages.Withdraw: self._withdraw,
            messages.Administer: self._administer,
        }
        self.measured = Measured(self._verbs)

    def handle(
        self, client_id: int, request: messages.Request, now: float
    ) -> messages.Answer | Steps[messages.Answer | None] | None:
        """What the client asks: the answer where nothing has to be done for it, or else the work that ends with it.

        None stands for the answer of a request that has none.

        Raises EmsError: it is refused, with the reason; so may the work.
        """
        mine = self._host.request_filter(client_id, request)
        inner = request if mine is None else mine.inward(request)
        if self._host.restarting and _begins_something(inner):
            raise PoolRestarting("the node restarts for an upgrade, ask again in a second")
        if mine is not None:
            return self._handle_tenants(mine, client_id, request, inner, now)
        return self._verbs[type(inner)](client_id, inner, now)

    def _handle_tenants(
        self, mine: TenantRequestFilter, client_id: int, request: messages.Request, inner: messages.Request, now: float
    ) -> Steps[messages.Answer | None]:
        if isinstance(inner, messages.Open) and inner.page_size and self._core.find_namespace(inner.name) < 0:
            mine.opens()
        if isinstance(inner, messages.Attach) and self._core.segment_tenant(inner.segment) != mine.tenant:
            raise StaleReference(f"segment {inner.segment} holds no page of this tenant, look again")
        if isinstance(inner, messages.Stats):
            return messages.Figures({**self._host.figures(own=True), **mine.figures(self._core.rows(mine.numbers))})
        answer = self._verbs[type(inner)](client_id, inner, now)
        if isinstance(answer, GeneratorType):
            answer = yield from answer
        mine.tally.count(request, answer)  # type: ignore[arg-type] # it is no generator any more
        return mine.outward(answer)  # type: ignore[arg-type]

    def _lookup(
        self, client_id: int, request: messages.Lookup, now: float
    ) -> messages.Hits | Steps[messages.Answer | None]:
        if request.tail is not None:
            return self._lookup_tail(client_id, request, request.tail, now)
        asked = len(request.keys) // KEY_BYTES
        if asked > MOST_AT_ONCE:
            return self._look_long(client_id, request, asked)
        keys = split_keys(request.keys)
        found = self._core.reading.lookup(
            client_id, request.namespace, keys, lease=request.lease, request=request.request
        )
        if len(found.pages) == asked:
            return self._hits(request, found, 0)
        asking = self._asking(client_id, request, directories=request.directories)
        look = partial(self._below.looked_up, request.namespace, keys, len(found.pages), asking)
        return self._when_told(request, now, look, partial(self._hits, request, found))

    def _when_told(
        self, request: messages.Lookup, now: float, look: Callable[[], Below], hits: Callable[[int], messages.Hits]
    ) -> messages.Hits | Steps[messages.Answer | None]:
        """``hits`` for how many keys come up, which ``look`` says; later where tiers are asked and it can wait."""
        below = look()
        if below.asked and request.patience and len(request.keys) <= MOST_HELD * KEY_BYTES:
            return self._wait_until_told(below, now + request.patience / 1e6, look, hits)
        return hits(below.keys)

    def _wait_until_told(
        self, below: Below, until: float, look: Callable[[], Below], hits: Callable[[int], messages.Hits]
    ) -> Steps[messages.Answer | None]:
        while below.asked and (waking := self._below.learns(until)) is not None:
            yield waking
            below = look()
        return hits(below.keys)

    def _look_long(self, client_id: int, request: messages.Lookup, asked: int) -> Steps[messages.Answer | None]:
        ns, promoting, asking = request.namespace, 0, self._asking(client_id, request)
        found = yield from self._core.reading.lookup_in_steps(
            client_id, ns, _parts(request.keys), asked, lease=request.lease, request=request.request
        )
        if self._below.states:
            promoting = yield from some_at_a_time(
                request.keys, len(found.pages), lambda some, start: self._below.looked_up(ns, some, start, asking).keys
            )
        return self._hits(request, found, promoting)

    def _asking(
        self, client_id: int, request: messages.Lookup | messages.Prefetch | messages.Announce, directories: bytes = b""
    ) -> Asking:
        compute = request.compute / 1e6 if isinstance(request, messages.Lookup) else 0.0
        return Asking(self._host.party(client_id), compute, request.local_only, directories)

    def _hits(self, request: messages.Lookup, found: Found, promoting: int) -> messages.Hits:
        """The answer: what is there, how many keys behind it come up from tiers, why the next one is missing."""
        count, code = len(found.pages), found.code
        name, page_size = self._core.named(request.namespace) if code or found.lease else ("", 0)
        if code and self._below.states:
            missing = request.keys[count * KEY_BYTES : (count + 1) * KEY_BYTES]
            local_only = request.local_only
            better = why(self._below.states, name, missing, code, promoting=promoting > 0, local_only=local_only)
            code = code if better == code else self._core.reasons.revise(code, better, request.request)
        if found.lease:
            self.measured.loaded_bytes.observe(count * page_size)
            if self._below.states:
                self._below.used(request.namespace, found.pages)
        return messages.Hits(count, found.pending, found.lease, found.refs, b"", code, promoting)

    def _lookup_tail(
        self, client_id: int, request: messages.Lookup, tail: Tail, now: float
    ) -> messages.Hits | Steps[messages.Answer | None]:
        shared, held = self._core.reading.lookup_tail(client_id, request.namespace, tail, lease=request.lease)
        masks = request.keys[: MAX_SHARDS * KEY_BYTES]
        asking = self._asking(client_id, request)
        look = partial(self._below.looked_up_tail, request.namespace, tail, shared, masks, asking)
        return self._when_told(request, now, look, partial(self._hits_of_tail, request, shared, held))

    def _hits_of_tail(self, request: messages.Lookup, shared: int, held: Found, comes: int) -> messages.Hits:
        if held.lease and self._below.states:
            self._below.used(request.namespace, held.pages)
        key = held.pages[0].key if held.pages else b""
        return messages.Hits(shared, held.pending, held.lease, held.refs, key, 0, comes)

    def _prefetch(self, client_id: int, request: messages.Prefetch, _now: float) -> Steps[messages.Done]:
        return messages.Done((yield from self._prefetch_some(client_id, request)))

    def _prefetch_some(self, client_id: int, request: messages.Prefetch | messages.Announce) -> Steps[int]:
        number, asking = request.namespace, self._asking(client_id, request)
        prefetch = self._below.prefetch
        return (yield from some_at_a_time(request.keys, 0, lambda some, start: prefetch(number, some, asking) - start))

    def _release(self, client_id: int, request: messages.Release, _now: float) -> None:
        # Nobody waits for an answer, and one would be taken for that of the next request.
        with contextlib.suppress(StaleReference):
            self._core.reading.release(client_id, request.lease)

    def _abort(self, client_id: int, request: messages.Abort, _now: float) -> Steps[messages.Done]:
        while self._core.writing.abort(client_id, request.reservation, STEP):
            yield None
        return messages.Done()

    def _still_writing(self, client_id: int, request: messages.StillWriting, _now: float) -> messages.Done:
        still = set(cut(request.refs, REF_BYTES))
        return messages.Done(self._core.deferred.stopped(self._core.writer(client_id), still))

    def _open(self, _client_id: int, request: messages.Open, _now: float) -> messages.Opened:
        if self._host.open:
            refuse_marked(request.name)
        # A tier below memory may have pages of a namespace that nobody has stored anything in since the start.
        size = request.page_size
        number = self._core.find_namespace(request.name) if not size else -1
        if number < 0:
            size = size or self._below.page_size(request.name)
            number = self._core.open_namespace(request.name, size) if size else -1
        return messages.Opened(number)

    def _attach(self, _client_id: int, request: messages.Attach, _now: float) -> messages.SegmentAttached:
        return messages.SegmentAttached(request.segment, self._host.segment_size(request.segment))

    def _stats(self, _client_id: int, _request: messages.Stats, _now: float) -> messages.Figures:
        return messages.Figures(self._host.figures(own=False))

    def _changes(self, _client_id: int, request: messages.Changes, now: float) -> Steps[messages.Changed]:
        yield None  # as much work as a step of any other request, and to be taken in turns like these
        return messages.Changed(*self._core.changes.since(request.sequence, request.namespaces, now))

    def _describe(self, _client_id: int, request: messages.Describe, _now: float) -> messages.Done:
        self._core.reasons.layouts.describe(request.name, request.facts)
        return messages.Done()

    def _miss(self, _client_id: int, request: messages.Miss, _now: float) -> messages.Hits:
        code = self._core.reading.missed_namespace(request.name, request.keys, request.request)
        return messages.Hits(0, 0, 0, b"", b"", code)

    def _explain(self, _client_id: int, request: messages.Explain, _now: float) -> Steps[messages.Explained]:
        answer: messages.Explained | None = None
        parts: list[bytes] = []
        for keys in _parts(request.keys):
            if parts:
                yield None
            one = self._core.reading.explain(request.name, keys)
            codes = one.codes if answer is None else one.codes.replace(b"\0", _GAP)
            parts.append(revised(self._below.states, request.name, keys, codes, local_only=request.local_only))
            if answer is None and any(codes):
                same = parts[-1].lstrip(b"\0")[0] == codes.lstrip(b"\0")[0]
                answer = one if same else messages.Explained(b"")
        return msgspec.structs.replace(answer or messages.Explained(b""), codes=b"".join(parts))

    def _announce(self, client_id: int, request: messages.Announce, now: float) -> Steps[messages.Announced]:
        yield from self._prefetch_some(client_id, request)
        # Who waits has the request only: cut up, its keys are four times as large.
        yield from self._settle_announcements()
        number = self._core.announce(client_id, request.namespace, split_keys(request.keys), now)
        yield from self._settle_announcements()
        return messages.Announced(number)

    def _withdraw(self, client_id: int, request: messages.Withdraw, _now: float) -> Steps[None]:
        self._core.announcements.withdraw(client_id, request.announcement)
        yield from self._settle_announcements()

    def _settle_announcements(self) -> Steps[None]:
        """Who puts off much waits until it is done, so that what is put off stays bounded."""
        while self._core.announcements.unsettled:
            yield None
            self._core.announcements.settle_some()

    def _administer(self, client_id: int, request: messages.Administer, _now: float) -> messages.Reported:
        return messages.Reported(self._host.administer(client_id, request.act, dry_run=request.dry_run))

    def _reserve(self, client_id: int, request: messages.Reserve, _now: float) -> Steps[messages.Granted]:
        parent = request.parent
        tails = yield from self._tails(request)
        outcomes, begun = b"", Begun()
        refs: list[bytes] = []
        for part in _parts(request.keys):
            start = len(outcomes)
            if start:
                yield None
            listed = tails[start : start + STEP]
            reserved = self._storing.reserve(client_id, request.namespace, parent, part, listed, begun)
            if begun.reservation and not reserved.reservation:
                # All of it was taken back.
                outcomes, refs = outcomes.replace(_GRANTED, _NO_SPACE), []
            outcomes += reserved.outcomes
            refs.append(packed_refs(reserved.granted))
            refusal = next((one for one in _REFUSALS if one in reserved.outcomes), None)
            begun = Begun(reserved.reservation, len(outcomes), begun.refusal or refusal)
            parent = part[-1] if part else parent
        return messages.Granted(begun.reservation, outcomes, b"".join(refs))

    def _tails(self, request: messages.Reserve) -> Steps[list[Tail | None]]:
        """The tails of all keys, none at all when no key has one; each is looked at before anything is stored."""
        given = request.tails or {}
        for count, (position, tail) in enumerate(given.items()):
            if count and count % STEP == 0:
                yield None
            key = request.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            self._core.writing.refuse_unfit_tail(request.namespace, key, tail)
        return [given.get(position) for position in range(len(request.keys) // KEY_BYTES)] if given else []

    def _corrupt(self, _client_id: int, request: messages.Corrupt, _now: float) -> Steps[messages.Done]:
        """A reader found wrong bytes: look at them, and take the page out of the pool if it is so."""
        core = self._core
        count = looked = 0
        length = core.named(request.namespace)[1]
        for key, ref in zip(split_keys(request.keys), unpack_refs(request.refs), strict=True):
            if core.page_at(request.namespace, key, ref.pack()) is None:
                continue  # its slot has another page by now
            if looked + length > LOOKED_AT_ONCE and looked:
                yield None
                looked = 0
            looked += length
            if (yield from self._applier.verify_page(ref, key, length)):
                core.counters.corrupt_unconfirmed += 1
                continue
            page = core.page_at(request.namespace, key, ref.pack())
            if page is None:
                continue  # it left while its bytes were looked at
            core.quarantine(request.namespace, page)
            self._applier.quarantine_header(ref, key)
            count += 1
            _log.error("bytes of a page are wrong, its slot is not used any more", key=key.hex(), slot=str(ref[:3]))
        return messages.Done(count)

    def _commit(self, client_id: int, request: messages.Commit, _now: float) -> Steps[messages.Done]:
        core = self._core
        positions = core.reservations.written(client_id, request.reservation, request.positions)
        checksums: list[int] | None = None
        if request.checksums and request.positions is not None:
            checksums = np.frombuffer(request.checksums, dtype="<u4").tolist()
            if request.positions != positions:
                by_position = dict(zip(request.positions, checksums, strict=True))
                checksums = [by_position[position] for position in positions]
        pages: list[Page] = []
        for start in range(0, max(len(positions), 1), STEP):
            if start:
                yield None
            part = slice(start, start + STEP)
            sums = None if checksums is None else checksums[part]
            done = self._storing.commit(client_id, request.reservation, positions[part], sums)
            self._below.committed(core.find_namespace(done.namespace), done.pages, request.cluster_write)
            pages += done.pages
        self.measured.saved_bytes.observe(len(pages) * done.page_size)
        # What came in the first steps is not to leave before what hangs on it.
        for start in range((len(pages) - 1) // STEP * STEP, -1, -STEP) if len(pages) > STEP else ():
            yield None
            core.writing.refresh(pages[start : start + STEP], done.namespace)
        return messages.Done(len(pages))


def _parts(keys: bytes) -> Iterator[list[bytes]]:
    """``keys``, as many at a time as one step has."""
    for start in range(0, max(len(keys), 1), STEP * KEY_BYTES):
        yield split_keys(keys[start : start + STEP * KEY_BYTES])


def some_at_a_time(keys: bytes, start: int, ask: Callable[[list[bytes], int], int]) -> Steps[int]:
    """``ask`` for ``keys`` from ``start`` on, :data:`MOST_AT_ONCE` at a time; how many come without a gap.

    It gets some keys and where those begin that are asked for: the one before says what they continue.
    """
    at = start
    while at < len(keys) // KEY_BYTES:
        if at > start:
            yield None
        before = min(at, 1)
        some = split_keys(keys[(at - before) * KEY_BYTES : (at + MOST_AT_ONCE) * KEY_BYTES])
        count = max(ask(some, before), 0)
        at += count
        if count < len(some) - before:
            break
    return at - start


def _begins_something(request: messages.Request) -> bool:
    """Whether a restart would cut off what ``request`` begins."""
    if isinstance(request, messages.Administer):
        return not isinstance(request.act, List | Show | Follow | Upgrade)
    return isinstance(request, messages.Reserve) or (isinstance(request, messages.Lookup) and request.lease)
