"""Connections in memory and in virtual time: the router's own shells, without sockets and without waiting.

What always holds: bytes arrive in the loop's next rounds, in order; who sends more than ``HIGH`` bytes that the other
side does not take is told to wait; a connection closes when all that was sent has been taken.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from socket import AF_INET, IPPROTO_TCP, SOCK_STREAM
from typing import Any, Final

HIGH: Final = 4096
"""Bytes that nobody took, above which a sender is told to wait."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next timer whenever nothing else is to be done."""

    _ready: Any
    _scheduled: Any

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


class NetworkLoop(VirtualLoop):
    """Has a network of its own; a port of it takes connections, keeps them waiting for ever, or refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: dict[int, Callable[[], asyncio.Protocol] | None] = {}
        """What answers on a port; None where nothing is heard of a connection."""

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(AF_INET, SOCK_STREAM, IPPROTO_TCP, "", (host, port))]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0)
        if port not in self.listening:
            raise ConnectionRefusedError("refused")
        answering = self.listening[port]
        if answering is None:
            await asyncio.Event().wait()
            raise AssertionError
        near = protocol_factory()
        return connect(self, near, answering()), near


class Wire(asyncio.Transport):
    """One end of a connection."""

    _peer: Wire

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self._loop = loop
        self._protocol = protocol
        self._arrived = b""
        self._reading = True
        self._closing = False
        self._blocked = False
        self._lost = False

    def write(self, data: Any) -> None:
        if self._closing or self._lost:
            return
        self._peer._arrived += data
        self._loop.call_soon(self._peer._deliver)
        if len(self._peer._arrived) > HIGH and not self._blocked:
            self._blocked = True
            self._protocol.pause_writing()

    def _deliver(self) -> None:
        if self._lost or not self._reading:
            return
        data, self._arrived = self._arrived, b""
        if data and not self._closing:
            self._protocol.data_received(data)
        if self._peer._blocked and not self._peer._lost:
            self._peer._blocked = False
            self._peer._protocol.resume_writing()
        if self._peer._closing and not self._arrived:
            self._peer._lose(None)
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def close(self) -> None:
        self._closing = True
        if not self._peer._arrived:
            self._lose(None)
        self._loop.call_soon(self._peer._deliver)

    def abort(self) -> None:
        self._closing = True
        self._lose(None)
        self._loop.call_soon(self._peer._lose, ConnectionResetError("reset"))

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return 0 if self._lost else len(self._peer._arrived)

    def can_write_eof(self) -> bool:
        return False


def connect(loop: asyncio.AbstractEventLoop, near: asyncio.Protocol, far: asyncio.Protocol) -> Wire:
    """Connect two protocols; return the near end."""
    ends = Wire(loop, near), Wire(loop, far)
    ends[0]._peer, ends[1]._peer = ends[1], ends[0]
    far.connection_made(ends[1])
    near.connection_made(ends[0])
    return ends[0]
