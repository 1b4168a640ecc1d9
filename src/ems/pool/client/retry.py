"""When a node that is gone, or does not want this client, is tried again."""

from __future__ import annotations

from ems.errors import PoolUnavailable, Unauthorised

RETRY_SECONDS = 0.5
"""Least time between two attempts to reach a node that is gone.  One that hangs costs its callers their time, so the
pause doubles at each of its failures in a row."""
MAX_RETRY_SECONDS = 8.0
REFUSED_RETRY_SECONDS = 30.0
"""Time between two attempts at a node that does not accept this client's credentials."""


class ConnectionEnded(PoolUnavailable):
    """The node ended the connection before it answered: it restarted, or it is gone."""


class Retry:
    """Times are seconds of any one clock that goes forward."""

    def __init__(self) -> None:
        self.refusal: Unauthorised | None = None
        """Why the node did not want this client; None when it was not there at all."""
        self._next = 0.0
        self._hung = 0

    def due(self, now: float) -> bool:
        return now >= self._next

    def failed(self, now: float, *, hung: bool) -> None:
        """The node did not answer in time (``hung``), or is not there."""
        self.refusal = None
        self._hung = self._hung + 1 if hung else 0
        self._next = now + min(RETRY_SECONDS * 2 ** max(self._hung - 1, 0), MAX_RETRY_SECONDS)

    def refused(self, now: float, refusal: Unauthorised) -> None:
        """The node does not want this client.  Only a person can mend that: it is not to hear of it again and again."""
        self.refusal, self._next = refusal, now + REFUSED_RETRY_SECONDS

    def reached(self) -> None:
        self.refusal, self._hung = None, 0
