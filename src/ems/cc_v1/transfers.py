"""Pages into engine memory, and engine memory into pages.

What always holds of a load: a block counts as loaded only if its page was the right one before and after the copy,
with the right bytes as far as these are checked; the pages stay where they are meanwhile, because a lease says so; the
lease ends whatever happens.  And of a save: a page is committed only when all of its bytes are in place; slots that
were promised are given back whatever happens; a block that somebody else stored or is storing counts as saved.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ems.cc_v1.arguments import Blocks
from ems.cc_v1.future import CcFuture
from ems.cc_v1.names import BlockNames
from ems.errors import EmsError, NoSpace
from ems.pool.client.answers import Namespace, Reservation
from ems.pool.client.pool_client import CommittedAhead, PoolClient, ReservedAhead
from ems.pool.pages import STORED, Outcome
from ems.pool.segments.reader import LeasedPages, PageReader
from ems.transfers.checksums import PageSums
from ems.transfers.plan import CopyPlan, Slots

if TYPE_CHECKING:  # these need torch
    from ems.transfers.device import Device
    from ems.transfers.rows import TokenRows

LOOKUP_KEYS = 1 << 14
"""Keys of one question to the pool; a prompt hardly has more."""
TOKEN_COUNT = struct.Struct("<I")
"""The note at the end of a page that has fewer tokens than a block: how many."""
RESERVATION_BYTES = 32 << 20
"""Bytes of one reservation, of which the next is made ready meanwhile: others can read the first pages before the last
are copied."""
RESERVATION_PAGES = 256
"""Most pages of one reservation: as many as a node does in one step, so that the first are copied soon."""
COMMIT_SECONDS = 1.0
"""Time for a commit or abort when the deadline is over: the copies are done, it would be a pity."""
TOUCH_PATIENCE = 1.0
"""How long saves wait in a row, all in all and in vain, for a node that is still touching its memory."""
_TOUCH_PAUSE = 0.05
_REFUSALS = {
    Outcome.NO_SPACE: "all of the pool that this model may have is in use (read or written now, or lately by other "
    "models), enlarge it or save later, or the node is being drained, which `ems health` says",
    Outcome.NOT_TOUCHED: "the node is still making its memory, save later",
    Outcome.OVER_SHARE: "as much is being saved at a time as may be, save later",
}


class Transfers:
    """Loads and saves of the caches ``rows``, over one connection; saves come one after the other, and so do loads.

    They never change: caches that are registered again get others, and transfers on their way keep theirs.
    """

    def __init__(self, client: PoolClient, rows: TokenRows, device: Device, namespace: Namespace) -> None:
        self.rows = rows
        self.device = device
        self.namespace = namespace
        self.names = BlockNames(namespace.name)
        self._client = client
        self._patience = TOUCH_PATIENCE

    @property
    def _batch(self) -> int:
        """How many pages are copied in one go."""
        return self.device.pages_at_once(self.namespace.page_size, self.rows.page_copies)

    # Loads

    def load(self, blocks: Blocks, future: CcFuture) -> None:
        """Load leading ``blocks`` as far as the pool has them; ``future`` learns how many.

        Raises PoolError: the pool failed; what was loaded by then counts.
        """
        while future.progress < len(blocks) and future.open:
            span = range(future.progress, min(future.progress + LOOKUP_KEYS, len(blocks)))
            self._load_run(blocks, span, [self.names.whole(blocks.hashes[i]) for i in span], future)
            missing = future.progress
            if missing < span.stop:
                if not blocks.whole(missing) and future.open:
                    beginning = self.names.beginning(blocks.hashes[missing])
                    self._load_run(blocks, range(missing, missing + 1), [beginning], future)
                if future.progress == missing:
                    return

    def _load_run(self, blocks: Blocks, span: range, keys: Sequence[bytes], future: CcFuture) -> None:
        """Load leading blocks of ``span`` from the pages of ``keys``."""
        packed, left, local_only = b"".join(keys), future.remaining(), future.local_only
        hits = self._client.lookup(self.namespace, packed, lease=True, timeout=left, local_only=local_only)
        if hits.lease is None:
            return
        try:
            reader = self._client.reader(self.namespace, hits.lease.epoch)
            pages = reader.look(hits.lease.packed_refs, b"".join(keys[: hits.count]))
            step = self._batch
            for begin in range(0, pages.present, step):
                batch = range(begin, min(begin + step, pages.present))
                good = self._load_batch(reader, pages, batch, blocks, span.start, future)
                future.advance(span.start + good)
                if good < batch.stop:
                    break
            self._client.report(self.namespace, reader)
        finally:
            self._client.release(hits.lease)

    def _load_batch(
        self, reader: PageReader, pages: LeasedPages, batch: range, blocks: Blocks, first: int, future: CcFuture
    ) -> int:
        """Where the first page of ``batch`` is that was not loaded; ``first`` is the position of the first block."""
        spans = []
        for at in batch:
            position = first + at
            if pages.key(at) != self.names.whole(blocks.hashes[position]):
                page = reader.page(pages.ref(at))
                (tokens,) = TOKEN_COUNT.unpack_from(page, len(page) - TOKEN_COUNT.size)
                if not blocks.offsets[position] <= tokens < blocks.block_size:
                    break
            spans.append(blocks.span(position))
        if not spans:
            return batch.start
        starts = pages.starts[batch.start : batch.start + len(spans)]
        plan = self.rows.plan(spans, Slots(starts, self.namespace.page_size, pages.segments), out=False)
        good = batch.start
        for step in plan.in_steps(self.device.step_bytes):
            with future.copying() as allowed:
                if not allowed:
                    break
                self._copied(step.plan)
            good, end = reader.sound(pages, good, batch.start + step.whole), batch.start + step.whole
            if good < end:
                break
        return reader.same(pages, batch.start, good)

    # Saves

    def save(self, blocks: Blocks, future: CcFuture) -> None:
        """Store leading ``blocks`` as far as the pool has room; ``future`` learns how many.

        Raises NoSpace: the pool has no room, not even for the first of them.
        Raises PoolError: the pool failed; what was stored by then counts.
        """
        start = 0
        ahead: ReservedAhead | None = None
        commits: deque[tuple[CommittedAhead, int]] = deque()
        try:
            while start < len(blocks) and future.open:
                asked, alone = ahead or self._ask(blocks, start, future), ahead is None
                ahead = None
                if asked is None:
                    self._settle(commits, future, 0)
                    start += 1
                    future.advance(start)
                    continue
                reservation = self._client.end_reserve(asked, future.remaining())
                end = start + len(asked.keys)
                refused = any(outcome not in STORED for outcome in reservation.outcomes)
                if end < len(blocks) and blocks.whole(end) and not refused:  # pages would leave for what is called off
                    ahead = self._ask(blocks, end, future)
                stored, stopped = self._fill(reservation, blocks, start, future, commits)
                start += stored
                if start < end and ahead is not None:
                    self._call_off(ahead)
                    ahead = None
                if stopped is None:
                    continue
                self._settle(commits, future, 0)
                # What was promised before an answer that was asked for ahead is committed now, and there may be room.
                if alone and not self._waited(stopped, future):
                    break
            self._settle(commits, future, 0)
        finally:
            if ahead is not None:
                self._call_off(ahead)
            with contextlib.suppress(EmsError):  # it failed already
                self._settle(commits, future, 0)
            for commit, _ in commits:
                self._give_back(commit.reservation)

    def _waited(self, stopped: Outcome, future: CcFuture) -> bool:
        """Whether it is worth while to ask again; waits for that a moment.  Raises NoSpace: as :meth:`save` does."""
        if stopped == Outcome.NOT_TOUCHED and self._patience > 0:
            future.pause(_TOUCH_PAUSE)
            self._patience -= _TOUCH_PAUSE
            return True
        if not future.progress:
            raise NoSpace(f"none of {future.total} blocks was stored: {_REFUSALS[stopped]}")
        return False

    def _ask(self, blocks: Blocks, start: int, future: CcFuture) -> ReservedAhead | None:
        """Ask for slots of the blocks from ``start`` on; None where the first lacks tokens and is there whole."""
        names, hashes = self.names, blocks.hashes
        if not blocks.whole(start):
            whole, left = names.whole(hashes[start]), future.remaining()
            if self._client.lookup(self.namespace, whole, timeout=left, local_only=future.local_only).count:
                return None
        keys = [names.key(hashes[i], whole=blocks.whole(i)) for i in range(start, self._end(blocks, start))]
        parent = names.key(hashes[start - 1], whole=blocks.whole(start - 1)) if start else names.before(hashes[0])
        return self._client.begin_reserve(self.namespace, parent, keys, future.remaining())

    def _call_off(self, ahead: ReservedAhead) -> None:
        with contextlib.suppress(EmsError):  # the connection is gone, and the reservation with it
            self._client.call_off(ahead, COMMIT_SECONDS)

    def _settle(self, commits: deque[tuple[CommittedAhead, int]], future: CcFuture, left: int) -> None:
        """Wait until all but ``left`` of ``commits`` are done, and count what they stored."""
        while len(commits) > left:
            commit, progress = commits[0]
            self._client.end_commit(commit, max(future.remaining(), COMMIT_SECONDS))
            commits.popleft()
            future.advance(progress)

    def _end(self, blocks: Blocks, start: int) -> int:
        """Where the next reservation ends: a block that lacks tokens is one of its own."""
        if not blocks.whole(start):
            return start + 1
        most = min(max(RESERVATION_BYTES // self.namespace.page_size, 1), RESERVATION_PAGES)
        limit = min(start + most, len(blocks))
        return next((i for i in range(start, limit) if not blocks.whole(i)), limit)

    def _fill(
        self,
        reservation: Reservation,
        blocks: Blocks,
        start: int,
        future: CcFuture,
        commits: deque[tuple[CommittedAhead, int]],
    ) -> tuple[int, Outcome | None]:
        """Copy what was granted of the blocks from ``start`` on, and have it committed, after those before it.

        Returns how many leading ones are stored then, and the outcome that stopped it.  All others are given back.
        """
        outcomes = reservation.outcomes
        leading = next((i for i, outcome in enumerate(outcomes) if outcome not in STORED), len(outcomes))
        wanted = [i for i in reservation.positions if i < leading]
        try:
            written = self._copy(reservation, wanted, blocks, start, future)
            stored = next((i for i in wanted if i not in written), leading)
            if written:
                patience, checksums = max(future.remaining(), COMMIT_SECONDS), list(written.values())
                commit = self._client.begin_commit(
                    reservation, list(written), patience, checksums, future.cluster_write
                )
                commits.append((commit, start + stored))
                self._patience = TOUCH_PATIENCE
        except BaseException:
            self._give_back(reservation)
            raise
        if len(written) < len(reservation.positions):
            self._give_back(reservation)
        self._settle(commits, future, 1 if written else 0)
        if not written:
            future.advance(start + stored)
        return stored, Outcome(outcomes[leading]) if stored == leading < len(outcomes) else None

    def _copy(
        self, reservation: Reservation, wanted: Sequence[int], blocks: Blocks, start: int, future: CcFuture
    ) -> dict[int, int]:
        """Copy the granted positions ``wanted``; the checksums of those done."""
        step = self._batch
        written: dict[int, int] = {}
        for begin in range(0, len(wanted), step):
            batch = wanted[begin : begin + step]
            segments = self._client.segments(reservation.epoch)  # fails once that connection is gone
            size = self.namespace.page_size
            starts, memory = segments.places(reservation.refs(batch), size)
            slots = Slots(starts, size, memory)
            plan = self.rows.plan([blocks.span(start + i) for i in batch], slots, out=True)
            for at, i in enumerate(batch):
                if not blocks.whole(start + i):
                    TOKEN_COUNT.pack_into(slots.page(at), size - TOKEN_COUNT.size, blocks.offsets[start + i])
            sums = PageSums(slots)
            for part in plan.in_steps(self.device.step_bytes, in_order=self.device.sums):
                with future.copying() as allowed:
                    if not allowed:
                        break
                    self._copied(part.plan, sums)
                sums.whole = part.whole
            written.update(zip(batch, sums.done, strict=False))
            if sums.whole < len(batch):
                break
        return written

    def _copied(self, plan: CopyPlan, sums: PageSums | None = None) -> None:
        """Make the copies of ``plan``; whatever fails, none of them runs any more."""
        try:
            self.device.copy(plan, sums)
        finally:
            self.device.synchronise()

    def _give_back(self, reservation: Reservation) -> None:
        with contextlib.suppress(EmsError):  # the connection is gone, and the reservation with it; or all was committed
            self._client.abort(reservation, COMMIT_SECONDS)
