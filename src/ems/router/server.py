"""The router as a process: its listening socket, its log, its start and its end.

SIGTERM and the first SIGINT stop the listening, let running requests finish for ``drain_timeout`` seconds, and end with
status 0; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from typing import TYPE_CHECKING

import uvloop

from ems.http.address import Address
from ems.http.process import CannotListen, allow_many_connections, listen, set_up_log, tell
from ems.http.server import Server
from ems.router.app import Router
from ems.router.config import RouterConfig
from ems.router.fleet import Role

if TYPE_CHECKING:
    from ems.router.workers.parent import Post

EXIT_CANNOT_LISTEN = 3
"""Exit status when the port cannot be had; a supervisor should not just start the router again."""
_COLLECT_AFTER = 20_000  # objects, as many as some hundred running requests hold


def serve(config: RouterConfig, *, log_level: str = "info") -> int:
    """Run a router until it is told to stop; return the exit status of the process.

    :raises ConfigError: the host to listen on is unknown, or not one of this machine.
    """
    try:
        listener = listen(config.host, config.port)
    except CannotListen as error:
        tell(f"error: {error}")
        return EXIT_CANNOT_LISTEN
    set_up_log(log_level)
    allow_many_connections()
    with listener:
        post = None
        if config.workers > 1:
            from ems.router.workers.parent import Parent

            begun = Parent(config.workers, config.drain_timeout, tell).run(listener)
            if isinstance(begun, int):
                return begun
            post = begun
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config, listener, post))
    return 0


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
        tell(words) if link is None else link.serves(words)
        await stop.wait()
        if count := router.counters.running:
            tell(
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
