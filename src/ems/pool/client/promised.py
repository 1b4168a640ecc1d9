"""Slots that a client was promised and may still write into, whatever became of the promise.

A node that lost its connection to a client, or was started again, cannot know which copies still run, so it gives the
slots to nobody until the client says so.  What always holds: a slot is among these from before the node's answer is
used until its caller has committed or given it up, and the node is told of too many rather than too few.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ems.pool.client.answers import Reservation
from ems.pool.keys import cut
from ems.pool.layout import REF_BYTES
from ems.pool.protocol.limits import MAX_KEYS


class PromisedSlots:
    """Reservations of one client, on all its connections, whose copies may run; for several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[Reservation, set[int]]] = {}
        """Each reservation by its connection and number, and at which positions no copy runs any more."""
        self._any = False
        self._ended = 0
        """How many copies ended of which the node was not node_knows there and then."""
        self._named = (1, 0)
        """Connection and value of ``_ended`` that the node was told of; a client's first has nothing to tell."""

    def promised(self, reservation: Reservation) -> None:
        if reservation.packed_refs:
            with self._lock:
                self._held[reservation.epoch, reservation.number] = reservation, set()

    def ended(self, reservation: Reservation, positions: Iterable[int] | None, *, node_knows: bool) -> None:
        """No copy into the slots of ``positions`` (all, when None) runs any more; ``told``: the node knows that."""
        name = reservation.epoch, reservation.number
        with self._lock:
            _, over = self._held.get(name, (None, set[int]()))
            granted = reservation.positions
            over.update(granted if positions is None else positions)
            if over.issuperset(granted):
                self._held.pop(name, None)
            self._ended += not node_knows

    def asked(self) -> None:
        """The node is asked for slots: from now on it may wait for this client, whether its answer comes or not."""
        with self._lock:
            self._any = True

    def untold(self, epoch: int) -> bool:
        """Whether the node of the connection ``epoch`` may wait for copies that it was not node_knows of."""
        with self._lock:
            return self._any and self._named != (epoch, self._ended)

    def news(self, epoch: int) -> tuple[bytes, tuple[int, int]] | None:
        """What to tell the node on the connection ``epoch``: all slots that may be written into.

        With it comes a mark for :meth:`was_named`; None where the node knows, or where these are more than can be told.
        """
        with self._lock:
            mark = epoch, self._ended
            if mark == self._named:
                return None
            refs = [
                ref
                for held, over in self._held.values()
                for position, ref in zip(held.positions, cut(held.packed_refs, REF_BYTES), strict=True)
                if position not in over
            ]
            return (b"".join(refs), mark) if len(refs) <= MAX_KEYS else None

    def was_named(self, mark: tuple[int, int]) -> None:
        with self._lock:
            self._named = mark
