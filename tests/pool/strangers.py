"""Other users: who listens where a node is expected, and nodes that run as a service account.

The kernel says of a listening socket whose it was when it began to listen, so that one process can be them all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

STRANGER, SERVICE = 65534, 65533
"""Two users that are neither root nor the one of the tests."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextlib.contextmanager
def as_user(user: int) -> Iterator[None]:
    """This process is ``user``'s meanwhile."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


class Stranger:
    """What somebody on a socket was sent."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []


@contextlib.contextmanager
def listening(
    path: Path,
    *answers: bytes,
    user: int = STRANGER,
    passes_on_to: Path | None = None,
    instead: Mapping[bytes, bytes] | None = None,
) -> Iterator[Stranger]:
    """``user`` listens on ``path``, with an answer for each thing that it hears, or those of another socket.

    In these he says one thing ``instead`` of another.
    """
    stranger = Stranger()

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer, socket.socket(socket.AF_UNIX) as beyond:
                if passes_on_to is not None:
                    beyond.connect(str(passes_on_to))
                for written in answers or [b""] * 99:
                    answer, asked = written, peer.recv(1 << 16)
                    if not asked:
                        break
                    stranger.heard.append(asked)
                    if passes_on_to is not None:
                        beyond.sendall(asked)
                        answer = beyond.recv(1 << 16)
                        for told, said in (instead or {}).items():
                            answer = answer.replace(told, said)
                    peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        with as_user(user):
            listener.bind(str(path))
            path.chmod(0o777)
            listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield stranger
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)


@contextlib.contextmanager
def place_for_all() -> Iterator[Path]:
    """A folder in shared memory in which everybody may make what is theirs, like ``/dev/shm`` itself."""
    with tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as path:
        Path(path).chmod(0o1777)
        yield Path(path)


def folder_of(user: int, path: Path) -> Path:
    """A folder that ``user`` made and opened to all."""
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, user, user)
    return path
