"""The router as a process: its listening socket, its log, its start and its end.

SIGTERM and the first SIGINT stop the listening, let running requests finish for ``drain_timeout`` seconds, and end with
status 0; a second signal ends at once.
"""

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
from typing import TYPE_CHECKING

import uvloop

from ems.errors import ConfigError, EmsError
from ems.http.address import Address
from ems.http.server import Server
from ems.router.app import Router
from ems.router.config import RouterConfig
from ems.router.fleet import Role

if TYPE_CHECKING:
    from ems.router.workers.parent import Post

EXIT_CANNOT_LISTEN = 3
_COLLECT_AFTER = 20_000  # objects, as many as some hundred running requests hold
"""Exit status when the port cannot be had; a supervisor should not just start the router again."""

log = logging.getLogger("ems.router")


class CannotListen(EmsError):
    """The listening socket cannot be had, though the settings are sound."""


def serve(config: RouterConfig, *, log_level: str = "info") -> int:
    """Run a router until it is told to stop; return the exit status of the process.

    :raises ConfigError: the host to listen on is unknown, or not one of this machine.
    """
    try:
        listener = listen(config.host, config.port)
    except CannotListen as error:
        _tell(f"error: {error}")
        return EXIT_CANNOT_LISTEN
    _set_up_log(log_level)
    _allow_many_connections()
    with listener:
        post = None
        if config.workers > 1:
            from ems.router.workers.parent import Parent

            begun = Parent(config.workers, config.drain_timeout, _tell).run(listener)
            if isinstance(begun, int):
                return begun
            post = begun
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, listener, post))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Bind a TCP socket.

    :raises ConfigError: the host is unknown, or not one of this machine.
    :raises CannotListen: the port is in use, or reserved.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"Cannot listen on --host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening here, not in the event loop, finds out who else has bound the port.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"Cannot listen on --host {host}: it is not an address of this machine") from error
        reason = "it is in use, choose another --port" if error.errno == errno.EADDRINUSE else error.strerror
        raise CannotListen(f"Cannot listen on port {port} of {host}: {reason}") from error
    return listener


async def _run(config: RouterConfig, listener: socket.socket, post: Post | None) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    link = None
    if post is not None:
        from ems.router.workers.link import Link

        link = Link(post, config.session_lifetime, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, hurry.set)
    for number in (signal.SIGINT, signal.SIGTERM):  # its parent counts them for a worker, which may get them twice
        loop.add_signal_handler(number, signalled if link is None else stop.set)
    async with Router(config, link=link) as router:
        loop.add_signal_handler(signal.SIGHUP, router.reload)
        if link is not None:
            link.open()
        server = Server(router, body_timeout=config.body_timeout)
        await server.start(listener, router.tls)
        # What stands now stays, and a request leaves no cycles: collections need not come every few requests.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        host, port = listener.getsockname()[:2]
        words = (
            f"Listening on {'http' if router.tls is None else 'https'}://{Address(host, port)}\n"
            f"Initialized {len(router.fleet.listed(Role.PREFILL))} prefill clients and "
            f"{len(router.fleet.listed(Role.DECODE))} decode clients."
        )
        _tell(words) if link is None else link.serves(words)
        await stop.wait()
        if count := router.counters.running:
            _tell(
                f"Stopping when the requests under way ({count}) are done, in {config.drain_timeout:g} s at the latest."
            )
        server.drain()
        draining = asyncio.create_task(server.drained(config.drain_timeout))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if hurry.is_set():
            draining.cancel()
            await server.drained(0)


def _allow_many_connections() -> None:
    """Raise the limit on open files as far as allowed: each running request has two or three sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.warning("Cannot raise the limit on open files: %s", error)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or nobody who reads: no reason to end without draining
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _set_up_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("ems")
    ours.handlers = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False
