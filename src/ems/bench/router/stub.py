"""Engines that answer at once from memory, so that what is measured is the router.

A prefill answers with ``kv_transfer_params``; a decode counts those requests that bring them back.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

ENGINE_ID: Final = b"stub-engine-7"
ANSWER: Final = (
    b'{"id":"cmpl-1","object":"text_completion","model":"stub","choices":[{"index":0,"text":"'
    + b"x" * 880
    + b'","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}}'
)
EVENT: Final = (
    b'data: {"id":"cmpl-1","object":"text_completion","model":"stub","choices":[{"index":0,"text":" word",'
    b'"finish_reason":null}]}\n\n'
)
LAST_EVENT: Final = b"data: [DONE]\n\n"
_PREFILLED = (
    b'{"id":"cmpl-1","object":"text_completion","model":"stub","choices":[{"index":0,"text":" a","finish_reason":'
    b'"length"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"'
    + ENGINE_ID
    + b'","remote_block_ids":[[1,2,3,4,5,6,7,8]],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}'
)
_MODELS = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"stub","max_model_len":32768}]}'
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Engine:
    """One stub in either role: what it sends, and what it has seen."""

    def __init__(self, chunks: int, interval: float) -> None:
        self.chunks = chunks
        self.interval = interval
        self.prefills = 0
        self.decodes = 0
        self.handed_over = 0
        """Decodes that brought a prefill's parameters."""
        self.answer = whole(ANSWER)
        self.prefilled = whole(_PREFILLED)
        self.event = chunk(EVENT)
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on a free port of this host and return it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, loop), "127.0.0.1", 0, backlog=2048)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._transport: asyncio.Transport
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, blank, rest = self._data.partition(b"\r\n\r\n")
            if not blank:
                return
            head = head.lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if b"transfer-encoding: chunked" in head:
                end = rest.find(b"0\r\n\r\n")
                if end < 0:
                    return
                length = end + 5
            if len(rest) < length:
                return
            self._data = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        engine = self._engine
        if head.startswith(b"get "):
            self._transport.write(whole(_MODELS if b"/models" in head.partition(b"\r\n")[0] else b"{}"))
        elif b'"do_remote_decode":true' in body or b'"do_remote_decode": true' in body:
            engine.prefills += 1
            self._transport.write(engine.prefilled)
        else:
            engine.decodes += 1
            engine.handed_over += ENGINE_ID in body
            if b'"stream":true' in body or b'"stream": true' in body:
                self._transport.write(_STREAM_HEAD)
                self._next(engine.chunks)
            else:
                self._transport.write(engine.answer)

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(self._engine.event)
            self._loop.call_later(self._engine.interval, self._next, left - 1)
        else:
            self._transport.write(chunk(LAST_EVENT) + b"0\r\n\r\n")
