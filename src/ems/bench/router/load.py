"""Clients of a router: connections that send one request after the other, or requests at a given rate."""

from __future__ import annotations

import asyncio
import time
from typing import Final, cast

from ems.errors import EmsError

_PROMPT = b"hello " * 330
_BODY = b'{"model":"stub",%b"max_tokens":16,"temperature":0,"stream":%b,"prompt":"%b"}'
_TO_PREFILL = b'"kv_transfer_params":{"do_remote_decode":true},'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
TIMEOUT: Final = 60.0


class LoadFailed(EmsError):
    """A router gave another answer than the stubs did, or none."""


def request_of(*, stream: bool = False, to_prefill: bool = False) -> bytes:
    body = _BODY % (_TO_PREFILL if to_prefill else b"", b"true" if stream else b"false", _PROMPT)
    return _HEAD % len(body) + body


class Client(asyncio.Protocol):
    """One connection; a request's answer is whole when its last bytes are there, which both framings show."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[bytes] | None = None
        self._received: list[bytes] = []
        self._missing: int | None = None
        """Bytes still to come; None until the head is there, -1 for a chunked answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes) -> bytes:
        """Send a request; return its answer, head and body as received.

        :raises LoadFailed: the connection ends, or nothing comes for :data:`TIMEOUT` seconds.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self._received = []
        self._missing = None
        self._transport.write(request)
        try:
            async with asyncio.timeout(TIMEOUT):
                answer = await self._answer
        except TimeoutError:
            raise LoadFailed(f"no answer came within {TIMEOUT:g} s") from None
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise LoadFailed(f"a request was answered with {answer[:300]!r}")
        return answer

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        if self._missing is None:
            received = b"".join(self._received)
            head, blank, rest = received.partition(b"\r\n\r\n")
            if not blank:
                return
            self._received = [received]
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._missing = int(length) - len(rest) if length else -1
        elif self._missing > 0:
            self._missing -= len(data)
        last = data if len(data) >= 5 else b"".join(self._received[-5:])
        if self._answer is not None and (not self._missing or (self._missing < 0 and last.endswith(b"0\r\n\r\n"))):
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_result(b"".join(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(LoadFailed(f"the connection ended before the answer did: {error}"))

    def close(self) -> None:
        self._transport.close()


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def closed_loop(port: int, request: bytes, connections: int, requests: int) -> list[float]:
    """Send so many requests over so many connections, each as soon as the last one was answered; return seconds."""
    times: list[float] = []
    left = requests

    async def one() -> None:
        nonlocal left
        client = await connect(port)
        while left > 0:
            left -= 1
            began = time.perf_counter()
            await client.ask(request)
            times.append(time.perf_counter() - began)
        client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one())
    return times


async def open_loop(ports: tuple[int, ...], requests: tuple[bytes, ...], rate: float, seconds: float) -> list[float]:
    """Begin ``rate`` requests a second, whatever becomes of those before; return seconds from when each was due.

    A request may have several legs, each to a port of its own, one after the other.
    """
    idle: list[tuple[Client, ...]] = []
    times: list[float] = []

    async def one(due: float) -> None:
        clients = idle.pop() if idle else tuple([await connect(port) for port in ports])
        for client, request in zip(clients, requests, strict=True):
            await client.ask(request)
        times.append(time.perf_counter() - due)
        idle.append(clients)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(due))
    for clients in idle:
        for client in clients:
            client.close()
    return times
