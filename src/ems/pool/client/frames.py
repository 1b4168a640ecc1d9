"""Frames off a socket, before a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from ems.pool.protocol.framing import FrameReader

_READ_SIZE = 64 << 10
"""Bytes read at a time; a larger buffer costs a system call more to be made."""


def receive_frame(sock: socket.socket, deadline: float, descriptors: list[int] | None = None) -> bytes:
    """One frame's body, with the file descriptors that came beside it."""
    return next(receive_frames(sock, deadline, descriptors))


def receive_frames(sock: socket.socket, deadline: float, descriptors: list[int] | None = None) -> Iterator[bytes]:
    """The bodies of the frames that come, one by one; what came behind the last one that was taken is lost."""
    reader = FrameReader()
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if descriptors is None:
            data = sock.recv(_READ_SIZE)
        else:
            data, received, _, _ = socket.recv_fds(sock, _READ_SIZE, 4)
            descriptors += received
        if not data:
            raise ConnectionResetError("the node closed the connection")
        reader.feed(data)
        yield from reader.frames()
