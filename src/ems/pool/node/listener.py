"""The socket on which a node listens: made only where nobody else listens, removed only if it is still this node's."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from ems.errors import ConfigError
from ems.pool.processes import foreign_owner

BACKLOG = 1024


class Listener:
    """A listening Unix socket at ``path`` with ``mode``, in a folder that is made with mode 0700 if need be.

    With ``descriptor`` it is the socket on which an earlier process of the node listened; from now on new clients see
    this process behind it.

    Raises ConfigError: something is there that is no dead node's socket, or the socket cannot be made, or others may
    connect to it but cannot reach it.
    """

    def __init__(self, path: Path, descriptor: int | None = None, *, mode: int = 0o600) -> None:
        self._path = path
        if descriptor is not None:
            self.sock = socket.socket(fileno=descriptor)
            self.sock.setblocking(False)
            self.sock.listen(BACKLOG)
            self._made = path.lstat() if path.exists() else os.fstat(descriptor)
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_if_foreign(path)
            _refuse_if_hidden(path, mode)
            if _is_dead(path):
                path.unlink(missing_ok=True)
            mask = os.umask(~mode & 0o777)
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

    def close(self, *, stays: bool = False) -> None:
        """Let go of the socket, and remove it unless it ``stays`` because another process goes on."""
        with contextlib.suppress(OSError):
            if not stays and os.path.samestat(self._made, self._path.lstat()):
                self._path.unlink()
        self.sock.close()


def _refuse_if_foreign(path: Path) -> None:
    """A socket in somebody else's folder can be replaced by theirs."""
    owner = foreign_owner(path)
    if owner is not None:
        raise ConfigError(
            f"{path} or its folder belongs to user {owner}, who could put a socket of his own there, expected a folder "
            f"of user {os.geteuid()} or root; give another path with --socket"
        )


def _refuse_if_hidden(path: Path, mode: int) -> None:
    """A socket for others in a folder that they cannot enter, or could put another socket into, helps nobody."""
    if not mode & 0o077:
        return
    folder = path.parent.stat().st_mode
    if not folder & 0o011:
        raise ConfigError(
            f"socket mode {mode:o} is for other users too, but they cannot enter {path.parent}; make that folder's "
            "mode 755, or name a socket elsewhere with --socket"
        )
    if folder & 0o022:
        raise ConfigError(
            f"others may write into {path.parent}, so anybody could put a socket of their own in place of {path.name}; "
            "name one in a folder of the node's user with --socket"
        )


def refuse_if_taken(path: Path) -> None:
    """Look whether a node could listen on ``path``.

    Raises ConfigError: somebody listens there, or something is there that is no socket.
    """
    try:
        _is_dead(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror}; give another path with --socket") from error


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
        f"another node is already listening on {path}; use it, stop it with 'ems stop', or give another --dir"
    )
