"""A real Redis for a test: on a port of its own, with nothing on disk."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def redis_server(port: int | None = None) -> Iterator[int]:
    """Run one and give its port."""
    command = shutil.which("redis-server")
    if command is None:
        pytest.fail("There is no redis-server: install it with 'apt-get install redis-server'")
    port = port or _free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"]
    server = subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL, cwd="/")
    try:
        _await(port, server)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
            one.sendall(b"PING\r\n")
            if one.recv(16).startswith(b"+PONG"):
                return
        time.sleep(0.01)
    pytest.fail("redis-server did not start")
