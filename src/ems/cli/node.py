"""``ems node``: run the pool node of this host until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
import uvloop
from cyclopts import Parameter

from ems.cli.node_file import SYSTEM_FILE, fields_of, read_file, settings
from ems.cli.options import Flag
from ems.cli.shown import complain
from ems.config import NodeConfig, PolicyName, allows_disk, format_size
from ems.errors import ConfigError, PoolError, PoolRefused
from ems.pool.layout import FORMAT_VERSION
from ems.pool.node.listener import refuse_if_taken
from ems.pool.node.pool_node import Node
from ems.pool.node.restart import Check, KeptOpen, become, kept_open
from ems.pool.processes import is_foreign
from ems.pool.tenants import store
from ems.pool.tiers.opening import open_tier
from ems.pool.tiers.settings import parse_tier
from ems.version import __version__

EXIT_CANNOT_START = 3


def node(
    *,
    config: Path | None = None,
    dir: Annotated[str, Parameter(env_var="EMS_DIR", show_default=False)] = "",  # noqa: A002 - the flag is called --dir
    allow_disk: bool | None = None,
    socket: Annotated[str, Parameter(env_var="EMS_SOCKET", show_default=False)] = "",
    socket_mode: str | None = None,
    tenants: Annotated[str, Parameter(env_var="EMS_TENANTS", show_default=False)] = "",
    size: Annotated[str, Parameter(env_var="EMS_POOL_SIZE", show_default=False)] = "",
    segment_size: str | None = None,
    high_watermark: float | None = None,
    eviction_ratio: float | None = None,
    policy: PolicyName | None = None,
    http_host: str | None = None,
    http_port: int | None = None,
    http_token_file: Path | None = None,
    http: bool | None = None,
    prefault: bool | None = None,
    verify: Literal["always", "sampled", "never"] | None = None,
    fresh: Flag = False,
    tier: Annotated[list[str] | None, Parameter(env_var="EMS_TIER", negative="")] = None,
    autostarted: Annotated[bool, Parameter(show=False)] = False,
    check: Annotated[bool, Parameter(show=False)] = False,
) -> int:
    """Run the pool node of this host.

    Flags go before environment variables, and these before the file of --config.

    Args:
        config: TOML file whose keys are these flags' names, as in size = "8GB"; default /etc/ems/node.toml if there.
        dir: tmpfs folder of the segments and of nothing else, default /dev/shm/ems (root) or /dev/shm/ems-UID.
        allow_disk: Keep the segments in that folder even where it is on a disk; default EMS_ALLOW_DISK.
        socket: Unix socket that engines connect to, default node.sock in that folder.
        socket_mode: Who may connect to it, as a file's octal mode, default 600; 666 lets others in, with --tenants.
        tenants: File of tenants and their keys (see ems tenant); without one who reaches the socket is let in.
        size: Shared memory for the pool, such as 8GB; default 4GiB or less where memory is scarce.
        segment_size: Size of one segment, default a sixteenth of the pool between 64 MiB and 1 GiB.
        high_watermark: Share of the pool in use at which eviction starts, default 0.95.
        eviction_ratio: Share of the pool that one eviction frees, default 0.05.
        policy: Which page leaves first: forecast (default) learns from the load; the others are for comparison.
        http_host: Address of /health, /readyz and /metrics, default 127.0.0.1.
        http_port: Port of the same, default 9410; 0 picks a free one.
        http_token_file: File (mode 600) with the token that shows names and keys over HTTP; nobody sees them without.
        http: Serve HTTP at all; by default it does.
        prefault: Touch the pool's memory in the background right after the start; by default it does.
        verify: Which loaded pages engines check against checksums, default sampled; those from before a restart always.
        fresh: Drop the pages that an earlier node left in the folder; what tiers have stays there.
        tier: Where pages live below memory, such as dir:/var/cache/ems?size=9GB, s3://bucket/prefix or
            mooncake:/etc/mooncake.json; may be repeated.
        autostarted: Set by engines that start a node by themselves.
        check: Say which release this is if it could start like this, and start nothing; a node asks before it restarts.
    """
    given = {name.replace("_", "-"): value for name, value in locals().items()}
    if allow_disk is None and os.environ.get("EMS_ALLOW_DISK"):
        given["allow-disk"] = allows_disk()
    if config is None and SYSTEM_FILE.exists() and not autostarted:
        config = SYSTEM_FILE
    fields = {} if config is None else read_file(config)
    fields |= fields_of(given)
    chosen = settings({**fields, "fresh": fresh, "autostarted": autostarted})
    if check:
        _log_to_stderr()  # what is checked may have something to say, too
        _can_start(chosen)
        print(msgspec.json.encode(Check(__version__, FORMAT_VERSION)).decode())
        return 0
    return _run(lambda: uvloop.run(_serve(chosen, kept_open())))


def _run(serve: Callable[[], None]) -> int:
    _log_to_stderr()
    # A segment and a client are an open file each; the default limit is for interactive programs.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # The index is many small objects without cycles: looking for cycles among them would only cost.
    gc.set_threshold(50_000, 50, 1_000)
    try:
        serve()
    except (ConfigError, PoolError) as error:
        complain(str(error))
        return EXIT_CANNOT_START
    return 0


def _can_start(config: NodeConfig) -> None:
    """Look at all that a start needs beside the folder and the sockets, which the node that asks has already."""
    _token(config)
    if config.tenants is not None:
        store.read(config.tenants)
    for tier in config.tiers:
        open_tier(parse_tier(tier), for_tenants=config.tenants is not None)
    if config.http_port is not None:
        import_module("ems.pool.http.server")


def _token(config: NodeConfig) -> str:
    path = config.http_token_file
    if path is None:
        return ""
    try:
        status = path.stat()
        if status.st_mode & 0o027 or is_foreign(status.st_uid):
            raise ConfigError(
                f"{path} can be read or changed by others (mode {status.st_mode & 0o777:o}, user {status.st_uid}), "
                "expected a file of this user or root with mode 600 or 640; change that, or make another token"
            )
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the token in {path} ({error.strerror}), give another --http-token-file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text, expected a token, give another --http-token-file") from error
    if not token:
        raise ConfigError(f"{path} is empty, expected a token; write one into it or leave --http-token-file out")
    return token


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR")),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@contextlib.contextmanager
def _bound(config: NodeConfig, kept: KeptOpen | None) -> Iterator[socket.socket | None]:
    """The socket of the HTTP server, None for a node without one; the one that was ``kept`` open if there is one.

    A node that an engine started takes any port where its own is taken: nobody is there to choose another.
    """
    host, port = config.http_host, config.http_port
    if kept is not None and kept.http is not None:
        with socket.socket(fileno=kept.http) as listener:
            if port is not None:
                yield listener
                return
    if port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            try:
                listener.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not config.autostarted:
                    raise
                listener.bind((host, 0))
            listener.listen()
        except OSError as error:
            if kept is not None:  # its clients do not lose their pool for that
                structlog.get_logger("ems.node").error("cannot serve HTTP", port=port, reason=error.strerror)
                yield None
                return
            refuse_if_taken(config.socket)  # by a node that has the port as well
            raise ConfigError(
                f"cannot serve HTTP on {host}:{port}: {error.strerror}; give another --http-port, 0 for a free one, "
                "or --no-http"
            ) from error
        yield listener


def _as_it_was(config: NodeConfig, kept: KeptOpen) -> NodeConfig:
    """The settings of a node that restarts: all of its pages stay, whatever a file of settings says by now."""
    return msgspec.structs.replace(
        config,
        fresh=False,
        size=kept.size,
        segment_size=kept.segment_size,
        directory=Path(kept.directory),
        socket=Path(kept.socket),
    )


async def _serve(config: NodeConfig, kept: KeptOpen | None) -> None:
    if kept is not None:
        config = _as_it_was(config, kept)
    token = _token(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = structlog.get_logger("ems.node")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(config, kept))
        # Pages by the hundred thousand are made, none of which is garbage.
        gc.disable()
        node = Node(config, kept=kept)
        stack.callback(node.close)
        node.start()
        gc.freeze()
        gc.enable()
        # A terminal that is closed says the same, and means the end.
        loop.add_signal_handler(signal.SIGHUP, stop.set if sys.stdin.isatty() else partial(_restart, node))
        port = listener.getsockname()[1] if listener else None
        slots = node.core.slots  # the arena has files of segments without memory, too
        log.info(
            "ready",
            socket=str(config.socket),
            pool=format_size(slots.total),
            segments=sum(bool(segment.size) for segment in slots.segments),
            http=f"http://{config.http_host}:{port}" if port else "off",
        )
        await _until_end(node, stop, listener, token)
        if node.restart.due.is_set():
            stays = node.keep_open(listener)
            node.close()
            await loop.shutdown_default_executor()
            become(stays)  # in here: to forget all pages one by one would take its time
        log.info("stopping")


async def _until_end(node: Node, stop: asyncio.Event, listener: socket.socket | None, token: str) -> None:
    """Wait until the node is to stop or to restart, and serve HTTP meanwhile."""
    waits: list[Coroutine[Any, Any, object]] = [stop.wait(), node.restart.due.wait()]
    if listener is not None:
        from ems.pool.http.server import HttpServer

        waits.append(HttpServer(node, private=node.config.tenants is not None, token=token).serve(listener))
    tasks = [asyncio.create_task(one) for one in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _restart(node: Node) -> None:
    try:
        node.restart.wish()
    except PoolRefused as error:
        structlog.get_logger("ems.node").warning("the node does not restart", reason=str(error))
