"""What a process that serves has of its host: a socket that listens, open files, a log."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import sys

from ems.errors import ConfigError, EmsError

log = logging.getLogger("ems.http")


class CannotListen(EmsError):
    """The listening socket cannot be had, though the settings are sound."""


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


def allow_many_connections() -> None:
    """Raise the limit on open files as far as allowed: each running request has two or three sockets."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.warning("Cannot raise the limit on open files: %s", error)


def tell(line: str) -> None:
    """Say something to whoever started this process."""
    with contextlib.suppress(OSError):  # a full disk, or nobody who reads: no reason to end without draining
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def set_up_log(level: str) -> None:
    """Write what EMS logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("ems")
    ours.handlers = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False
