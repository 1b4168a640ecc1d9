"""How many connections the HTTP server of a node has, and for how long each may keep it waiting.

A brain.  What always holds: there are never more than :data:`MAX_HTTP`, so the clients of the pool have the
descriptors; when one more comes, who has waited longest goes, so that nobody is kept out by who says nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from ems.pool.node.client_limits import MAX_HTTP

EXCHANGE_SECONDS = 10.0
"""How long a request and its answer may take, and how long a connection may be idle."""

_Name = TypeVar("_Name")


class ConnectionBudget(Generic[_Name]):
    """Connections by any names, and since when each has been waited for."""

    def __init__(self) -> None:
        self._since: OrderedDict[_Name, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def waits(self, name: _Name, now: float) -> list[_Name]:
        """From now on ``name``, which may be new, is waited for; those that have to end for it."""
        self._since[name] = now
        self._since.move_to_end(name)
        ended = []
        while len(self._since) > MAX_HTTP:
            ended.append(self._since.popitem(last=False)[0])
        return ended

    def ended(self, name: _Name) -> None:
        self._since.pop(name, None)

    def overdue(self, now: float) -> list[_Name]:
        """Those that have to end by now, because they took too long."""
        ended = []
        while self._since:
            name, since = next(iter(self._since.items()))
            if now - since < EXCHANGE_SECONDS:
                break
            del self._since[name]
            ended.append(name)
        return ended
