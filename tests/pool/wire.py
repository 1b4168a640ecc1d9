"""A client without manners: bytes to a node's socket, and what comes back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ems.pool import protocol
from ems.pool.protocol import FrameReader

PATIENCE = 10.0


class Wire:
    """One connection; ``greeted`` ones have said hello."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(path))
        self._reader = FrameReader()
        self._bodies: list[bytes] = []

    def send(self, *messages: protocol.Message | bytes) -> None:
        data = b"".join(one if isinstance(one, bytes) else protocol.encode(one) for one in messages)
        self.sock.sendall(data)

    def answer(self) -> protocol.Answer | None:
        """The next answer; None when the node closed the connection instead."""
        while not self._bodies:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data)
            self._bodies += self._reader.frames()
        return protocol.decode_answer(self._bodies.pop(0))

    def ask(self, message: protocol.Message) -> protocol.Answer | None:
        self.send(message)
        return self.answer()

    def refusal(self) -> protocol.Refused:
        """The next answer, which must be a refusal that ends the connection."""
        answer = self.answer()
        assert isinstance(answer, protocol.Refused), answer
        assert self.answer() is None, "the node refused but did not close"
        return answer

    def greet(self) -> protocol.Welcome:
        answer = self.ask(protocol.Hello(1, 1, "raw", os.getpid()))
        assert isinstance(answer, protocol.Welcome), answer
        return answer

    def open(self, name: str, page_size: int) -> int:
        answer = self.ask(protocol.Open(name, page_size))
        assert isinstance(answer, protocol.Opened), answer
        return answer.namespace


@contextmanager
def wire(path: Path, *, greeted: bool = True) -> Iterator[Wire]:
    """A connection to the node at ``path``, closed at the end."""
    one = Wire(path)
    try:
        if greeted:
            one.greet()
        yield one
    finally:
        one.sock.close()
