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
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import structlog
import uvloop
from cyclopts import Parameter

from ems.config import (
    DEFAULT_HTTP_PORT,
    DEFAULT_POLICY,
    NodeConfig,
    PolicyName,
    default_directory,
    format_size,
    parse_size,
)
from ems.errors import ConfigError, PoolError
from ems.pool.node.pool_node import Node
from ems.pool.node.succession import Inheritance
from ems.pool.tiers.settings import parse_tier

EXIT_CANNOT_START = 3


def node(
    *,
    dir: Annotated[Path | None, Parameter(env_var="EMS_DIR")] = None,  # noqa: A002 - the flag is called --dir
    socket: Annotated[Path | None, Parameter(env_var="EMS_SOCKET")] = None,
    socket_mode: str = "600",
    tenants: Annotated[Path | None, Parameter(env_var="EMS_TENANTS")] = None,
    size: Annotated[str | None, Parameter(env_var="EMS_POOL_SIZE")] = None,
    segment_size: str | None = None,
    high_watermark: float = 0.95,
    eviction_ratio: float = 0.05,
    policy: PolicyName = DEFAULT_POLICY,
    http_host: str = "127.0.0.1",
    http_port: int = DEFAULT_HTTP_PORT,
    http_token_file: Path | None = None,
    http: bool = True,
    prefault: bool = True,
    verify: Literal["always", "sampled", "never"] = "sampled",
    fresh: bool = False,
    tier: Annotated[list[str] | None, Parameter(env_var="EMS_TIER")] = None,
    autostarted: Annotated[bool, Parameter(show=False)] = False,
    take_over: Annotated[bool, Parameter(show=False)] = False,
) -> int:
    """Run the pool node of this host.

    Parameters
    ----------
    dir
        tmpfs folder of the segments, default /dev/shm/ems (root) or /dev/shm/ems-UID.
    socket
        Unix socket that engines connect to, default node.sock in that folder.
    socket_mode
        Who may connect to it, as the octal mode of a file; 666 lets other users in, which takes --tenants.
    tenants
        File of tenants and their keys (see ems tenant); without one the node is open to whoever reaches its socket.
    size
        Shared memory for the pool, such as 8GB; default 4GiB or less where memory is scarce.
    segment_size
        Size of one segment, default a sixteenth of the pool between 64 MiB and 1 GiB.
    high_watermark
        Share of the pool in use at which eviction starts.
    eviction_ratio
        Share of the pool that one eviction frees.
    policy
        Which page leaves first: forecast learns from the load; lru, s3fifo and arc are for comparison.
    http_host
        Address of /health, /readyz and /metrics.
    http_port
        Port of the same; 0 picks a free one.
    http_token_file
        File with the token that shows the metrics of a node with tenants; without one it shows them to nobody.
    http
        Serve HTTP at all.
    prefault
        Touch the pool's memory in the background right after the start.
    verify
        Which loaded pages engines check against their checksums; those from before a restart are checked always.
    fresh
        Drop the pages that an earlier node left in the folder; what tiers have stays there.
    tier
        Where pages live below memory, such as 'dir:/var/cache/ems?size=100GB' or 's3://bucket/prefix'; may be repeated.
    autostarted
        Set by engines that start a node by themselves.
    take_over
        Set by `ems upgrade`: be the node that listens on the socket, with its settings, in the place of its process.
    """
    directory = dir or default_directory()
    if take_over:
        return _run(lambda: _succeed(socket or directory / "node.sock"))
    config = NodeConfig(
        directory=directory,
        socket=socket or directory / "node.sock",
        socket_mode=_mode(socket_mode),
        tenants=tenants,
        size=parse_size(size, name="--size") if size else 0,
        segment_size=parse_size(segment_size, name="--segment-size") if segment_size else 0,
        high_watermark=high_watermark,
        eviction_ratio=eviction_ratio,
        policy=policy,
        http_host=http_host,
        http_port=http_port if http else None,
        http_token_file=http_token_file,
        prefault=prefault,
        verify=verify,
        fresh=fresh,
        tiers=tuple(tier or ()),
        autostarted=autostarted,
    )
    for one in config.tiers:
        parse_tier(one)
    return _run(lambda: uvloop.run(_serve(config)))


def _run(serve: Callable[[], None]) -> int:
    _log_to_stderr()
    _allow_many_files()
    # The index is many small objects without cycles: looking for cycles among them would only cost.
    gc.set_threshold(50_000, 50, 1_000)
    try:
        serve()
    except (ConfigError, PoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0


def _succeed(path: Path) -> None:
    """Take the place of the process that is the node on the socket ``path``."""
    # From here on its clients wait: whatever can be done before is done before.
    import ems.pool.http.server
    import ems.pool.policy.forecast  # noqa: F401 - loaded when needed, which must not be then

    inheritance = Inheritance(path)
    try:
        uvloop.run(_serve(inheritance.config, inheritance))
    except BaseException:
        inheritance.close()
        raise


def _mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ConfigError(f"--socket-mode is {text!r}, expected an octal mode such as 600 or 666") from None


def _token(config: NodeConfig) -> str:
    path = config.http_token_file
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path} ({error}), give another --http-token-file") from error
    if not token:
        raise ConfigError(f"{path} is empty, expected a token; write one into it or leave --http-token-file out")
    return token


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


async def _serve(config: NodeConfig, inheritance: Inheritance | None = None) -> None:
    token = _token(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = structlog.get_logger("ems.node")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(config)) if inheritance is None else None
        # Pages by the hundred thousand are made, none of which is garbage.
        gc.disable()
        node = Node(config, inheritance=inheritance)
        if inheritance is None:
            node.http_socket = listener
        elif node.http_socket is not None:
            listener = stack.enter_context(node.http_socket)
        stack.callback(node.close)
        node.start()
        gc.freeze()
        gc.enable()
        # A terminal that is closed says the same, and means the end.
        loop.add_signal_handler(signal.SIGHUP, stop.set if sys.stdin.isatty() else Successor(config).start)
        port = listener.getsockname()[1] if listener else None
        log.info(
            "ready",
            socket=str(config.socket),
            pool=format_size(sum(node.arena.sizes)),
            segments=len(node.arena.sizes),
            http=f"http://{config.http_host}:{port}" if port else "off",
        )
        if listener is None:
            await _end_of(node, stop)
        else:
            await _serve_http(node, listener, stop, token)
        if not node.handed_over.is_set():
            log.info("stopping")


async def _end_of(node: Node, stop: asyncio.Event) -> None:
    """Wait until the node is to stop, or is another process's."""
    ends = {asyncio.create_task(stop.wait()), asyncio.create_task(node.handed_over.wait())}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()


async def _serve_http(node: Node, listener: socket.socket, stop: asyncio.Event, token: str) -> None:
    from ems.pool.http.server import build_server

    server = build_server(node, private=node.config.tenants is not None, token=token)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(_end_of(node, stop))
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


class Successor:
    """What a node starts when it is asked (SIGHUP) to go on as a process of the release that is installed now."""

    def __init__(self, config: NodeConfig) -> None:
        self._socket = config.socket.absolute()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process that will ask to take over; one at a time."""
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "ems.cli", "node", "--take-over", "--socket", str(self._socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
