"""A client without manners: bytes to a node's socket, and what comes back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ems.pool.protocol import coding, messages
from ems.pool.protocol.coding import FrameReader

PATIENCE = 20.0


class Wire:
    """One connection; ``greeted`` ones have said hello."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(path))
        self._reader = FrameReader()
        self._bodies: list[bytes] = []

    def send(self, *sent: messages.Message | bytes) -> None:
        data = b"".join(one if isinstance(one, bytes) else coding.encode(one) for one in sent)
        self.sock.sendall(data)

    def answer(self) -> messages.Answer | None:
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
        return coding.decode_answer(self._bodies.pop(0))

    def ask(self, message: messages.Message) -> messages.Answer | None:
        self.send(message)
        return self.answer()

    def refusal(self) -> messages.Refused:
        """The next answer, which must be a refusal that ends the connection."""
        answer = self.answer()
        assert isinstance(answer, messages.Refused), answer
        assert self.answer() is None, "the node refused but did not close"
        return answer

    def greet(self) -> messages.Welcome:
        answer = self.ask(messages.Hello(1, 1, "raw", os.getpid()))
        assert isinstance(answer, messages.Welcome), answer
        return answer

    def open(self, name: str, page_size: int) -> int:
        answer = self.ask(messages.Open(name, page_size))
        assert isinstance(answer, messages.Opened), answer
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
