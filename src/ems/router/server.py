"""The router as a process: its listening socket, its log, its start and its end.

SIGTERM and the first SIGINT stop the listening, let running requests finish for ``drain_timeout`` seconds, and end with
status 0; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from ems.errors import ConfigError, EmsError
from ems.router.app import Router
from ems.router.config import Address, RouterConfig

EXIT_CANNOT_LISTEN = 3
"""Exit status when the port cannot be had; a supervisor should not just start the router again."""

_CLIENT_KEEP_ALIVE_SECONDS = 65  # above the usual 60 of proxies and clients, so that they close first

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
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config, listener))
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


async def _run(config: RouterConfig, listener: socket.socket) -> None:
    async with Router(config) as router:
        await _Server(router, listener).serve(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, router: Router, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                router,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_CLIENT_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, round(router.config.drain_timeout)),
            )
        )
        self._router_config = router.config
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        host, port = self._listener.getsockname()[:2]
        _tell(f"Listening on http://{Address(host, port)}")
        prefills, decodes = len(self._router_config.prefills), len(self._router_config.decodes)
        _tell(f"Initialized {prefills} prefill clients and {decodes} decode clients.")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on signals, and unlike the base class do not die of them afterwards: a drained end is a good one."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _allow_many_connections() -> None:
    """Raise the limit on open files as far as allowed: each running request has two or three sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.warning("Cannot raise the limit on open files: %s", error)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _set_up_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False
    # What the HTTP server has to say about requests is said by the router already.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
