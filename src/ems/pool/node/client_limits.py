"""How many connections a node has, and how many bytes it keeps for them.

A brain.  What always holds: descriptors are left for segments, tiers and the HTTP server, however many connect; who
does not greet keeps nobody out; no tenant (on an open node: no user) has more than half of the connections; where
buffers are full, the connection ends that has most of what the tenant with most has.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from ems.config import MIB
from ems.errors import PoolRefused

MAX_HTTP = 32
"""Most connections of the HTTP server."""
MAX_CLIENTS = 1024
"""Most connections, where the limit of open files leaves as many."""
SPARE_DESCRIPTORS = 32
"""Open files of a node beside its segments, the threads of its tiers, and connections."""
GREETING_SHARE = 4
"""One in so many connections may be one that has not greeted yet, of one user half of these."""
MAX_BUFFERED = 256 * MIB
"""Bytes that were sent in part, are of requests under way, or are left unread, by all clients together."""


def room_for_clients(descriptors: int, segments: int, threads: int) -> int:
    """Most connections of a node with ``segments``, whose tiers have ``threads``, and with so many ``descriptors``."""
    return max(min(descriptors - SPARE_DESCRIPTORS - MAX_HTTP - segments - threads, MAX_CLIENTS), 2 * GREETING_SHARE)


class _Client(msgspec.Struct):
    party: str
    """A tenant, or before that is known a user."""
    greeted: bool = False
    kept: int = 0
    """Bytes that it sent in part, that are under way for it, or that it left unread."""


class ClientLimits:
    """The connections of one node, by numbers; ``party`` is whose one is."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}
        self.kept = 0
        """The same of all of them together."""

    def __len__(self) -> int:
        return len(self._clients)

    def came(self, client: int, party: str, room: int) -> int | None:
        """``client`` connected to a node with ``room`` for so many; who has to end for it.

        That is the one that has been greeting for longest, of the same party where that has too many of these.
        """
        self._clients[client] = _Client(party)
        greeting = [(number, one.party) for number, one in self._clients.items() if not one.greeted]
        counts = Counter(whose for _, whose in greeting)
        most = max(room // GREETING_SHARE, 2)
        if counts[party] > most // 2:
            crowded = party
        elif len(greeting) > most:
            crowded = counts.most_common(1)[0][0]
        else:
            return None
        return next(number for number, whose in greeting if whose == crowded)

    def greeted(self, client: int, party: str, room: int) -> None:
        """``client``, which has greeted, is of ``party``.

        Raises PoolRefused: there are too many connections; it has to end.
        """
        most = room - max(room // GREETING_SHARE, 2)
        mine = max(most // 2, 1)
        counts = Counter(one.party for one in self._clients.values() if one.greeted)
        if counts[party] >= mine or counts.total() >= most:
            raise PoolRefused(
                f"{counts[party]} connections of {party} and {counts.total()} in all are open on this node, expected "
                f"at most {mine} and {most}; close some, or start the node with a higher limit of open files "
                "(ulimit -n)"
            )
        one = self._clients[client]
        one.party, one.greeted = party, True

    def keeps(self, client: int, size: int) -> tuple[int, int] | None:
        """``size`` bytes are kept for ``client`` from now on; who has to end because of what is kept for it."""
        self.kept += size - self._clients[client].kept
        self._clients[client].kept = size
        if self.kept <= MAX_BUFFERED:
            return None
        by_party = Counter[str]()
        for one in self._clients.values():
            by_party[one.party] += one.kept
        most = by_party.most_common(1)[0][0]
        kept = {number: one.kept for number, one in self._clients.items() if one.party == most}
        ends = max(kept, key=kept.__getitem__)
        return ends, kept[ends]

    def gone(self, client: int) -> None:
        one = self._clients.pop(client, None)
        if one is not None:
            self.kept -= one.kept
