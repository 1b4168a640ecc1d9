"""A node of which every answer is written down beforehand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ems.pool.protocol import coding, messages

WELCOME = coding.encode(messages.Welcome(1, "0" * 32, "1.0", autostarted=False, segments=1))


@contextmanager
def node_that_says(path: Path, *answers: bytes, heard: list[bytes] | None = None) -> Iterator[None]:
    """A server with one answer for each request of a connection, ``heard`` before; after the last it hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    for answer in answers:
                        if not (request := peer.recv(1 << 16)):
                            break
                        if heard is not None:
                            heard.append(request)
                        peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
