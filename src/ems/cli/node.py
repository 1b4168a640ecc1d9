"""``ems node``: run the pool node of this host until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import structlog
import uvloop
from cyclopts import Parameter

from ems.config import DEFAULT_HTTP_PORT, NodeConfig, default_directory, format_size, parse_size
from ems.errors import ConfigError
from ems.pool.node import Node

EXIT_CANNOT_START = 3


def node(
    *,
    dir: Annotated[Path | None, Parameter(env_var="EMS_DIR")] = None,  # noqa: A002 - the flag is called --dir
    socket: Annotated[Path | None, Parameter(env_var="EMS_SOCKET")] = None,
    size: Annotated[str | None, Parameter(env_var="EMS_POOL_SIZE")] = None,
    segment_size: str | None = None,
    high_watermark: float = 0.95,
    eviction_ratio: float = 0.05,
    http_host: str = "127.0.0.1",
    http_port: int = DEFAULT_HTTP_PORT,
    http: bool = True,
    prefault: bool = True,
    autostarted: Annotated[bool, Parameter(show=False)] = False,
) -> int:
    """Run the pool node of this host.

    Parameters
    ----------
    dir
        tmpfs folder of the segments, default /dev/shm/ems (root) or /dev/shm/ems-UID.
    socket
        Unix socket that engines connect to, default node.sock in that folder.
    size
        Shared memory for the pool, such as 8GB; default 4GiB or less where memory is scarce.
    segment_size
        Size of one segment, default a sixteenth of the pool between 64 MiB and 1 GiB.
    high_watermark
        Share of the pool in use at which eviction starts.
    eviction_ratio
        Share of the pool that one eviction frees.
    http_host
        Address of /health, /readyz and /metrics.
    http_port
        Port of the same; 0 picks a free one.
    http
        Serve HTTP at all.
    prefault
        Touch the pool's memory in the background right after the start.
    autostarted
        Set by engines that start a node by themselves.
    """
    directory = dir or default_directory()
    config = NodeConfig(
        directory=directory,
        socket=socket or directory / "node.sock",
        size=parse_size(size, name="--size") if size else 0,
        segment_size=parse_size(segment_size, name="--segment-size") if segment_size else 0,
        high_watermark=high_watermark,
        eviction_ratio=eviction_ratio,
        http_host=http_host,
        http_port=http_port if http else None,
        prefault=prefault,
        autostarted=autostarted,
    )
    _log_to_stderr()
    _allow_many_files()
    # The index is many small objects without cycles: looking for cycles among them would only cost.
    gc.set_threshold(50_000, 50, 1_000)
    try:
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@contextlib.contextmanager
def _bound(config: NodeConfig) -> Iterator[socket.socket | None]:
    """The socket of the HTTP server, None for a node without one.

    A node that an engine started takes any port where its own is taken: nobody is there to choose another.
    """
    host, port = config.http_host, config.http_port
    if port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _bind(listener, host, port, or_any=config.autostarted)
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"cannot serve HTTP on {host}:{port}: {error.strerror}; give another --http-port, 0 for a free one, "
                "or --no-http"
            ) from error
        yield listener


def _bind(listener: socket.socket, host: str, port: int, *, or_any: bool) -> None:
    try:
        listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not or_any:
            raise
        listener.bind((host, 0))


def _allow_many_files() -> None:
    """A segment and a client are an open file each; the default limit is for interactive programs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(config: NodeConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log = structlog.get_logger("ems.node")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(config))
        node = Node(config)
        stack.callback(node.close)
        node.start()
        port = listener.getsockname()[1] if listener else None
        log.info(
            "ready",
            socket=str(config.socket),
            pool=format_size(sum(node.arena.sizes)),
            segments=len(node.arena.sizes),
            http=f"http://{config.http_host}:{port}" if port else "off",
        )
        if listener is None:
            await stop.wait()
        else:
            await _serve_http(node, listener, stop)
        log.info("stopping")


async def _serve_http(node: Node, listener: socket.socket, stop: asyncio.Event) -> None:
    from ems.pool.http import build_server

    server = build_server(node.figures)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving
