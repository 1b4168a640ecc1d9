"""Watches over one running request: has its client left, does anything still move?

Either ends the request by cancelling its task; :attr:`Watch.reason` tells the task why, and is None when somebody else
cancelled it.  The timer looks at a time stamp instead of being set anew for each piece of a stream.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ems.router.reply import Receive


class Reason(Enum):
    """Why a watch cancelled its task."""

    LEFT = "left"
    """The client closed its connection."""
    IDLE = "idle"
    """Nothing moved for too long."""


class Watch:
    """Belongs to the task that makes it, which must :meth:`stop` it.  The request's body has been received before."""

    __slots__ = ("_idle", "_listener", "_loop", "_moved", "_task", "_timer", "reason")

    def __init__(self, receive: Receive, idle: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._idle = idle
        self._moved = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.reason: Reason | None = None
        self._listener = self._loop.create_task(self._listen(receive))

    def arm(self) -> None:
        """Start to demand that :meth:`moved` is called at least every ``idle`` seconds."""
        self.moved()
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle, self._look)

    def moved(self) -> None:
        self._moved = self._loop.time()

    def stop(self) -> None:
        self._listener.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        due = self._moved + self._idle
        if due <= self._loop.time():
            self._cancel(Reason.IDLE)
        else:
            self._timer = self._loop.call_at(due, self._look)

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # what comes after the body, if anything, means nothing
        self._cancel(Reason.LEFT)

    def _cancel(self, reason: Reason) -> None:
        if self.reason is None:
            self.reason = reason
            self._task.cancel()
