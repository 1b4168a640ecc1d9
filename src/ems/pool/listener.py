"""The socket on which a node listens: made only where nobody else listens, removed only if it is still this node's."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from ems.errors import ConfigError

BACKLOG = 128


class Listener:
    """A listening Unix socket at ``path`` with mode 0600, in a folder that is made with mode 0700 if need be.

    Raises:
        ConfigError: something is there that is no dead node's socket, or the socket cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(path)
            mask = os.umask(0o177)
            try:
                self.sock.bind(str(path))
            finally:
                os.umask(mask)
            self.sock.listen(BACKLOG)
            self._made = path.lstat()
        except OSError as error:
            self.sock.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}; give another path with --socket") from error
        except ConfigError:
            self.sock.close()
            raise

    def close(self) -> None:
        """Listen no more and remove the socket."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self._made, self._path.lstat()):
                self._path.unlink()
        self.sock.close()


def refuse_if_taken(path: Path) -> None:
    """Look whether a node could listen on ``path``.

    Raises:
        ConfigError: somebody listens there, or something is there that is no socket.
    """
    try:
        _is_dead(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror}; give another path with --socket") from error


def _remove_dead(path: Path) -> None:
    if _is_dead(path):
        path.unlink(missing_ok=True)


def _is_dead(path: Path) -> bool:
    """Whether there is a socket at ``path`` that nobody listens on."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there already and is no socket; give another path with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass  # Somebody listens and is slow.
    raise ConfigError(
        f"another node is already listening on {path}; use it, stop it with 'ems stop', or give another --socket"
    )
