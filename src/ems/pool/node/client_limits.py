"""How many connections a node has, and how many bytes it keeps for them.

A brain.  What always holds: descriptors are left for segments, tiers and the HTTP server, however many connect; who
does not greet keeps nobody out; no tenant (on an open node: no user) has more than half of the connections; where
buffers are full, the connection ends that has most of what the tenant with most has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from ems.config import MIB, format_size
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
"""Bytes that were sent in part, or are left unread, by all clients together."""


def room_for_clients(descriptors: int, segments: int, threads: int) -> int:
    """Most connections of a node with ``segments``, whose tiers have ``threads``, and with so many ``descriptors``."""
    return max(min(descriptors - SPARE_DESCRIPTORS - MAX_HTTP - segments - threads, MAX_CLIENTS), 2 * GREETING_SHARE)


class ClientLimits:
    """The connections of one node, by numbers; ``party`` is whose one is: a tenant, or before that is known a user."""

    def __init__(self) -> None:
        self._greeting: dict[str, OrderedDict[int, None]] = {}
        """Connections that have not greeted, by party; the oldest first."""
        self._greeted: Counter[str] = Counter()
        self._party: dict[int, str] = {}
        self._buffered: Counter[int] = Counter()
        self._buffered_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._party)

    def came(self, client: int, party: str, room: int) -> int | None:
        """``client`` connected to a node with ``room`` for so many; who has to end for it.

        That is the one that has been greeting for longest, of the same party where that has too many of these.
        """
        self._party[client] = party
        mine = self._greeting.setdefault(party, OrderedDict())
        mine[client] = None
        most = max(room // GREETING_SHARE, 2)
        if len(mine) > most // 2:
            return next(iter(mine))
        counts = Counter({name: len(waiting) for name, waiting in self._greeting.items()})
        if counts.total() > most:
            return next(iter(self._greeting[counts.most_common(1)[0][0]]))
        return None

    def greeted(self, client: int, party: str, room: int) -> None:
        """``client``, which has greeted, is of ``party``.

        Raises:
            PoolRefused: there are too many connections; it has to end.
        """
        most = room - max(room // GREETING_SHARE, 2)
        mine = max(most // 2, 1)
        if self._greeted[party] >= mine or self._greeted.total() >= most:
            raise PoolRefused(
                f"{self._greeted[party]} connections of {party} and {self._greeted.total()} in all are open on this "
                f"node, expected at most {mine} and {most}; close some, or start the node with a higher limit of open "
                "files (ulimit -n)"
            )
        self._leave_greeting(client)
        self._buffered_of[self._party[client]] -= self._buffered[client]
        self._buffered_of[party] += self._buffered[client]
        self._party[client] = party
        self._greeted[party] += 1

    def keeps(self, client: int, size: int) -> tuple[int, int] | None:
        """``size`` bytes are kept for ``client`` from now on; who has to end because of what is kept for it."""
        party = self._party[client]
        self._buffered_of[party] += size - self._buffered[client]
        self._buffered[client] = size
        if self._buffered_of.total() <= MAX_BUFFERED:
            return None
        most = max(self._buffered_of, key=self._buffered_of.__getitem__)
        theirs = (one for one in self._buffered if self._party[one] == most)
        ends = max(theirs, key=self._buffered.__getitem__)
        return ends, self._buffered[ends]

    def gone(self, client: int) -> None:
        party = self._party.get(client)
        if party is None:
            return
        if not self._leave_greeting(client):
            self._greeted[party] -= 1
            if not self._greeted[party]:
                del self._greeted[party]
        self._buffered_of[party] -= self._buffered.pop(client, 0)
        if not self._buffered_of[party]:
            del self._buffered_of[party]
        del self._party[client]

    def _leave_greeting(self, client: int) -> bool:
        party = self._party[client]
        mine = self._greeting.get(party)
        if mine is None or client not in mine:
            return False
        del mine[client]
        if not mine:
            del self._greeting[party]
        return True


def too_many_greetings(seconds: float) -> str:
    """What the one is told that ended because it had not greeted when others came."""
    return f"too many connections have not greeted, say Hello at once and not within {seconds:.0f} s"


def too_much_kept(size: int) -> str:
    """What the one is told that ended because buffers are full."""
    return (
        f"the clients of this node left {format_size(MAX_BUFFERED)} unfinished or unread together, {format_size(size)} "
        "of it on this connection; send requests whole, and read their answers"
    )
