"""Subscriptions to the KV events of engines, one task each: sockets in, changes of the prefix index out.

Nothing here is on the way of a request.  What always holds: a publisher that says nothing, or nonsense, costs nothing
but its own events; what a batch does is done at once, so that no request sees half of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final, Self

import zmq
import zmq.asyncio

from ems.engines.kv_events import read_batch
from ems.errors import ProtocolError
from ems.http.address import Address
from ems.router.choosing.chooser import Chooser
from ems.router.config import EventSource
from ems.router.events.source import Source
from ems.router.fleet import Fleet, Role

_LONGEST_REPLAY: Final = 5.0
"""Seconds within which a publisher must have sent each batch that was asked for."""
_LARGEST: Final = 64 << 20
"""Bytes of a batch."""

log = logging.getLogger("ems.router")


class Subscriber:
    """All subscriptions of a router; an asynchronous context manager."""

    def __init__(self, sources: Mapping[Address, EventSource], fleet: Fleet, chooser: Chooser) -> None:
        self._sources = sources
        self._fleet = fleet
        self._chooser = chooser
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._sources:
            self._context = zmq.asyncio.Context()
            self._context.linger = 0
            for address, where in self._sources.items():
                self._tasks.append(asyncio.create_task(self._listen(self._context, address, where)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._context is not None:
            self._context.term()

    async def _listen(self, context: zmq.asyncio.Context, address: Address, where: EventSource) -> None:
        source = Source()
        with context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
            socket.setsockopt(zmq.IPV6, 1)
            socket.subscribe(b"")
            socket.connect(where.endpoint)
            while True:
                frames = await socket.recv_multipart()
                try:
                    await self._batch(context, address, where, source, frames)
                except ProtocolError as error:
                    log.warning("KV events of %s: %s", address, error)
                except Exception:  # the root of the subscription's task: a defect must not end it
                    log.exception("KV events of %s could not be taken in by a defect of the router", address)

    async def _batch(
        self, context: zmq.asyncio.Context, address: Address, where: EventSource, source: Source, frames: list[bytes]
    ) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            raise ProtocolError("A message is not a batch of KV events: expected a topic, a number and a payload")
        number = int.from_bytes(frames[-2], "big")
        missing = source.missing(number)
        if missing is not None and where.replay:
            try:
                await self._replay(context, address, where.replay, source, missing, number)
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning("KV events of %s: batches %d to %d are lost: %r", address, missing, number - 1, error)
        self._take(address, source, number, frames[-1])

    async def _replay(
        self, context: zmq.asyncio.Context, address: Address, endpoint: str, source: Source, first: int, end: int
    ) -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(_LONGEST_REPLAY):
                    frames: list[Any] = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0 or number >= end:
                    return
                self._take(address, source, number, frames[-1])

    def _take(self, address: Address, source: Source, number: int, payload: bytes) -> None:
        try:
            events = read_batch(payload)
        except ProtocolError as error:
            log.warning("KV events of %s, batch %d: %s", address, number, error)
            events = []  # it would be no better when it is asked for again
        changes = source.heard(number, events)
        if not changes:
            return
        instances = [one for role in Role for one in self._fleet.listed(role) if one.address == address]
        assert source.block_tokens is not None
        self._chooser.adapters |= source.adapters
        taken = True
        for place, hashes, stored in changes:
            taken = self._chooser.take_event(instances, source.block_tokens, place, hashes, stored=stored)
        if not taken:
            log.warning("KV events of %s do not count: their blocks have %d tokens", address, source.block_tokens)
