"""Engine memory into pages.

What always holds: a page is committed only when all of its bytes are in place; slots that were promised are
given back whatever happens; a block that somebody else stored or is storing counts as saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ems.cc_v1.load import TOKEN_COUNT, batch_size
from ems.cc_v1.present import twice
from ems.errors import EmsError, NoSpace, StaleReference
from ems.pool.checksum import page_checksum
from ems.pool.pages import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ems.cc_v1.registration import Registration
    from ems.cc_v1.slots import Blocks
    from ems.cc_v1.transfer import CcFuture
    from ems.pool.client.answers import Reservation
    from ems.pool.client.pool_client import PoolClient

RESERVATION_BYTES = 64 << 20
"""Bytes promised at a time: others can read the first pages before the last are copied."""
COMMIT_SECONDS = 1.0
"""Time for a commit or abort when the deadline is over: the copies are done, it would be a pity."""
TOUCH_PATIENCE = 1.0
"""How long saves wait in a row, all in all and in vain, for a node that is still touching its memory."""
_TOUCH_PAUSE = 0.05
_REFUSALS = {
    Outcome.NO_SPACE: "all of the pool that this model may have is being read or written, enlarge it or save later",
    Outcome.NOT_TOUCHED: "the node is still making its memory, save later",
    Outcome.OVER_SHARE: "as much is being saved at a time as may be, save later",
}
_STORED = (Outcome.GRANTED, Outcome.PRESENT, Outcome.WRITING)


class Saver:
    """Saves for one registration, over one connection, one after the other."""

    def __init__(self, client: PoolClient, registration: Registration) -> None:
        self._client = client
        self._registration = registration
        self._patience = TOUCH_PATIENCE

    def save(self, blocks: Blocks, future: CcFuture) -> None:
        """Store leading ``blocks`` as far as the pool has room; ``future`` learns how many.

        Raises:
            NoSpace: the pool has no room, not even for the first of them.
            PoolError: the pool failed; what was stored by then counts.
        """
        while future.progress < len(blocks) and future.open:
            stopped = self._save_some(blocks, future)
            if stopped is None:
                continue
            if stopped != Outcome.NOT_TOUCHED or self._patience <= 0:
                if not future.progress:
                    raise NoSpace(f"none of {len(blocks)} blocks was stored: {_REFUSALS[stopped]}")
                return
            future.pause(_TOUCH_PAUSE)
            self._patience -= _TOUCH_PAUSE

    def _save_some(self, blocks: Blocks, future: CcFuture) -> Outcome | None:
        """Store the next blocks; the outcome that stopped it, None when all of these were stored."""
        names, namespace = self._registration.names, self._registration.namespace
        start, hashes = future.progress, blocks.hashes
        if not blocks.whole(start) and self._present(names.whole(hashes[start]), future):
            future.advance(start + 1)
            return None
        span = range(start, self._end(blocks, start))
        keys = [names.key(hashes[i], whole=blocks.whole(i)) for i in span]
        parent = names.key(hashes[start - 1], whole=blocks.whole(start - 1)) if start else names.before(hashes[0])
        reservation = twice(lambda: self._client.reserve(namespace, parent, keys, future.remaining()))
        outcomes = [Outcome(outcome) for outcome in reservation.outcomes]
        leading = next((i for i, outcome in enumerate(outcomes) if outcome not in _STORED), len(outcomes))
        written = self._fill(reservation, [i for i in reservation.granted if i < leading], blocks, start, future)
        if written:
            self._patience = TOUCH_PATIENCE
        lost = next((i for i in reservation.granted if i < leading and i not in written), leading)
        future.advance(start + lost)
        return outcomes[leading] if lost == leading and leading < len(outcomes) else None

    def _end(self, blocks: Blocks, start: int) -> int:
        """Where the next reservation ends: a block that lacks tokens is one of its own."""
        if not blocks.whole(start):
            return start + 1
        limit = start + max(RESERVATION_BYTES // self._registration.namespace.page_size, 1)
        return next((i for i in range(start, min(limit, len(blocks))) if not blocks.whole(i)), min(limit, len(blocks)))

    def _present(self, key: bytes, future: CcFuture) -> bool:
        namespace = self._registration.namespace
        return twice(lambda: self._client.lookup(namespace, key, timeout=future.remaining()).count) > 0

    def _fill(
        self, reservation: Reservation, wanted: Sequence[int], blocks: Blocks, start: int, future: CcFuture
    ) -> set[int]:
        """Copy and commit the granted positions ``wanted``; those that were done.  All others are given back."""
        try:
            written = self._copy(reservation, wanted, blocks, start, future)
            if written:
                patience = max(future.remaining(), COMMIT_SECONDS)
                self._client.commit(reservation, list(written), patience, list(written.values()))
        except BaseException:
            self._give_back(reservation)
            raise
        if len(written) < len(reservation.granted):
            self._give_back(reservation)
        return set(written)

    def _copy(
        self, reservation: Reservation, wanted: Sequence[int], blocks: Blocks, start: int, future: CcFuture
    ) -> dict[int, int]:
        if not wanted:
            return {}
        device, rows = self._registration.device, self._registration.rows
        memory = self._registration.memory(self._client, reservation.epoch)
        step = batch_size(self._registration)
        written: dict[int, int] = {}
        for begin in range(0, len(wanted), step):
            batch = wanted[begin : begin + step]
            pages = [memory.page(reservation.granted[i]) for i in batch]
            if self._client.epoch != reservation.epoch:
                raise StaleReference("the connection to the pool was lost while blocks were copied")
            plan = rows.plan([blocks.span(start + i) for i in batch], pages, out=True)
            with future.copying() as allowed:
                if not allowed:
                    break
                device.copy(plan)
                device.synchronise()
            for i, page in zip(batch, pages, strict=True):
                if not blocks.whole(start + i):
                    TOKEN_COUNT.pack_into(page, len(page) - TOKEN_COUNT.size, blocks.offsets[start + i])
            # Of the bytes as they lie in the slots, while they are in the processor's cache.
            written.update(zip(batch, map(page_checksum, pages), strict=True))
        return written

    def _give_back(self, reservation: Reservation) -> None:
        try:
            self._client.abort(reservation, COMMIT_SECONDS)
        except EmsError:
            # The connection is gone, and the reservation with it; or all of it was committed.
            return
