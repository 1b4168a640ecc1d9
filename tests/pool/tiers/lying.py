"""A proxy in front of an S3 server that lies, fails, hangs or cuts the line when it is told to."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Mood = Literal["honest", "wrong bytes", "other bytes", "500", "hang", "cut"]
HANG_SECONDS = 30.0


class LyingProxy(ThreadingHTTPServer):
    """Passes requests on to ``upstream`` as its ``mood`` is."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.mood: Mood = "honest"
        self.requests = 0
        self.let_go = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LyingProxy

    def _pass_on(self) -> None:
        proxy = self.server
        proxy.requests += 1
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if proxy.mood == "hang":
            proxy.let_go.wait(HANG_SECONDS)
            self.close_connection = True
            return
        if proxy.mood == "500":
            self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        connection = http.client.HTTPConnection(proxy.upstream, timeout=HANG_SECONDS)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _OWN}
        if self.command == "GET" and content:
            if proxy.mood == "wrong bytes":
                content = (
                    content[: len(content) // 2]
                    + bytes([content[len(content) // 2] ^ 1])
                    + content[len(content) // 2 + 1 :]
                )
            elif proxy.mood == "other bytes":
                content = bytes(len(content))
            elif proxy.mood == "cut":
                self._answer(response.status, kept, content[: len(content) // 2], len(content))
                self.close_connection = True
                return
        self._answer(response.status, kept, content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", headers.get("Content-Length", "0"))
        else:
            self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Quiet."""


_OWN = {"content-length", "transfer-encoding", "connection", "server", "date"}


@contextmanager
def lying_proxy(upstream: str) -> Iterator[LyingProxy]:
    """A proxy that runs; honest at first."""
    proxy = LyingProxy(upstream)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.let_go.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
