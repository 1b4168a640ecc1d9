"""An instance's answer on its way to the client: every piece goes out as it comes in, within the call that brings it.

What always holds: nothing is sent before the answer's first piece, so that up to there another instance can still take
over; no piece is held back, joined or cut, but where an engine may give an answer up: see
:mod:`ems.engines.recompute`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from ems.engines.recompute import Generated
from ems.engines.usage import Meter
from ems.http import headers
from ems.http.client import Connection, UpstreamBroken
from ems.http.headers import Returned
from ems.http.message import Headers
from ems.http.reply import Reply
from ems.router.errors import error_events

HELD_LIMIT: Final = 4 << 20
"""Bytes that are held back of an answer that its engine may give up; a larger one, or event, is passed on unwatched."""

_NOT_TAKEN: Final = frozenset((429, 503))
"""What an instance answers before it does anything for a request; behind a 502 it may have broken off amid it."""


class Relay:
    """One attempt to answer, or to go on with an answer.

    ``refuses`` is asked whether an answer with this status is given up for one of another instance, and ``begins`` is
    told the status just before something goes out.
    With ``generated`` an answer that its engine gives up is not ended; who owns the relay has it continued.
    """

    __slots__ = (
        "_begins", "_collected", "_last", "_loop", "_refuses", "_reply", "_returned", "_size",
        "_takes_events", "begun", "generated", "meter", "moved", "refused", "source", "status",
    )  # fmt: skip

    def __init__(
        self,
        reply: Reply,
        refuses: Callable[[int], bool],
        begins: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
        generated: Generated | None = None,
    ) -> None:
        self._reply = reply
        self._refuses = refuses
        self._begins = begins
        self._loop = loop
        self.status = 0
        self._returned: Returned
        self._takes_events = reply.status is not None
        self._last = b""
        self._collected: list[bytes] | None = None
        self._size = 0
        self.generated = generated
        self.meter = Meter()
        self.source: Connection | None = None
        self.begun = False
        """Whether the client has got something of it, after which there is no other attempt."""
        self.moved = loop.time()
        """When the instance last sent something."""
        self.refused = False
        """Whether its answer was given up for that of another instance."""

    @property
    def recomputes(self) -> bool:
        """Whether the answer has to be gone on with elsewhere."""
        return self.generated is not None and self.generated.broken_off

    @property
    def may_have_worked(self) -> bool:
        """Whether its instance may have begun to compute: it got the request and did not refuse it."""
        return self.source is not None and not (self.refused and self.status in _NOT_TAKEN)

    def comes_from(self, connection: Connection) -> None:
        self.source = connection

    def head(self, status: int, received: Headers) -> None:
        self.status = status
        self.moved = self._loop.time()
        if self._reply.status is None and self._refuses(status):
            self.refused = True
            raise UpstreamBroken(f"It answers {status}")
        returned = self._returned = headers.returned(received, self._reply.request_id)
        events = returned.is_event_stream and not returned.is_encoded
        if self._reply.status is not None and not (events and status == HTTPStatus.OK):
            raise UpstreamBroken(f"It answers {status} instead of going on with an answer")
        self._takes_events = events
        if self.generated is not None and not events:
            if status == HTTPStatus.OK and not returned.is_encoded:
                self._collected = []
            else:
                self.generated = None

    def piece(self, data: bytes) -> None:
        self.moved = self._loop.time()
        self.meter.feed(data)
        if self.generated is not None:
            data = self._watched(data, self.generated)
            if not data:
                return
        if not self.begun:
            self._begin()
        self._reply.piece(data)
        self._last = data

    def _watched(self, data: bytes, generated: Generated) -> bytes:
        """Return what goes out now; a client can make an answer large, so its engine is not to blame for it."""
        if self._collected is not None:
            self._collected.append(data)
            self._size += len(data)
            if self._size <= HELD_LIMIT:
                return b""
            data = b"".join(self._collected)
        else:
            data = generated.feed(data)
            if generated.held <= HELD_LIMIT:
                return data
            data += generated.rest()
        if generated.legs > 1 or generated.broken_off:
            raise UpstreamBroken(f"It goes on with an answer by more than {HELD_LIMIT} bytes at once")
        self.generated = self._collected = None
        return data

    def end(self) -> None:
        if self.generated is not None:
            rest = self.generated.rest() if self._collected is None else self._whole(b"".join(self._collected))
            if self.generated.broken_off:
                return
            if rest:
                if not self.begun:
                    self._begin()
                self._reply.piece(rest)
        if not self.begun:
            self._begin()
        self._reply.end()

    def _whole(self, collected: bytes) -> bytes:
        assert self.generated is not None
        try:
            body = self.generated.whole(collected)
        except ValueError as error:
            raise UpstreamBroken(f"Its answer is not JSON: {error}") from None
        if len(body) != len(collected):
            kept = [pair for pair in self._returned.headers if pair[0].lower() != b"content-length"]
            kept.append((b"content-length", b"%d" % len(body)))
            self._returned = self._returned._replace(headers=kept, is_sized=True)
        return body

    def _begin(self) -> None:
        self.begun = True
        self._begins(self.status)
        if self._reply.status is None:
            self._reply.head(self.status, self._returned.headers, sized=self._returned.is_sized)
        assert self.source is not None
        self._reply.comes_from(self.source)

    def break_off(self, message: str, code: str) -> None:
        """End an answer that has begun and cannot be completed: by an event, or by leaving it visibly incomplete."""
        if self._takes_events:
            self._reply.piece(error_events(message, code=code, after=self._last))
            self._reply.end()
