"""An instance's answer on its way to the client: every piece goes out as it comes in, within the call that brings it.

What always holds: nothing is sent before the answer's first piece, so that up to there another instance can still take
over; no piece is held back, joined or cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ems.router import headers
from ems.router.http.client import Connection
from ems.router.http.message import Headers
from ems.router.observe.usage import Meter
from ems.router.reply import Reply, error_events


class Relay:
    """One attempt to answer; ``begins`` is told the status just before the head goes out."""

    __slots__ = (
        "_begins",
        "_headers",
        "_last",
        "_loop",
        "_reply",
        "_status",
        "_takes_events",
        "begun",
        "meter",
        "moved",
        "source",
    )

    def __init__(self, reply: Reply, begins: Callable[[int], None], loop: asyncio.AbstractEventLoop) -> None:
        self._reply = reply
        self._begins = begins
        self._loop = loop
        self._status = 0
        self._headers: Headers = []
        self._takes_events = False
        self._last = b""
        self.meter = Meter()
        self.source: Connection | None = None
        self.begun = False
        """Whether the client has got something, after which there is no other attempt."""
        self.moved = loop.time()
        """When the instance last sent something."""

    def comes_from(self, connection: Connection) -> None:
        self.source = connection

    def head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        self.moved = self._loop.time()

    def piece(self, data: bytes) -> None:
        if not self.begun:
            self._begin()
        self._reply.piece(data)
        self._last = data
        self.meter.feed(data)
        self.moved = self._loop.time()

    def end(self) -> None:
        if not self.begun:
            self._begin()
        self._reply.end()

    def _begin(self) -> None:
        self.begun = True
        self._begins(self._status)
        returned = headers.returned(self._headers, self._reply.request_id)
        self._takes_events = returned.is_event_stream and not returned.is_encoded
        self._reply.head(self._status, returned.headers, sized=returned.is_sized)
        assert self.source is not None
        self._reply.comes_from(self.source)

    def break_off(self, message: str, code: str) -> None:
        """End an answer that has begun and cannot be completed: by an event, or by leaving it visibly incomplete."""
        if self._takes_events:
            self._reply.piece(error_events(message, code=code, after=self._last))
            self._reply.end()
