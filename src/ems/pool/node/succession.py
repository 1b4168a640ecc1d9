"""How a node hands itself over to a new process while its clients stay connected.

The new process connects like a client and asks (``TakeOver``).  The old one, which reads
nothing meanwhile, sends its state and all of its descriptors, and waits for ``Taken``.

What always holds: exactly one of the two serves.  The new one owns the node from the moment in which it could send
``Taken``; the old one closes its ear at the deadline, so that a ``Taken`` that is not there by then can never be sent,
and goes on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import ems
from ems.config import NodeConfig
from ems.errors import ConfigError, EmsError, PoolUnavailable, ProtocolError, VersionMismatch
from ems.pool.core.handover import VERSION, HandOver
from ems.pool.protocol import coding, framing, greeting, messages, refusals
from ems.pool.segments.layout import FORMAT_VERSION

HAND_OVER_SECONDS = 3.0
"""How long clients may wait for a hand-over that does not come about."""
_AT_ONCE = 200
"""Descriptors that travel with one message; the kernel takes 253."""
_READ_SIZE = 1 << 20
_HEAD = 4

_encoder = msgspec.msgpack.Encoder()


def plain_config(config: NodeConfig) -> dict[str, Any]:
    """``config`` in the form that travels."""
    values = msgspec.structs.asdict(config)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def give(sock: socket.socket, state: HandOver, descriptors: Sequence[int]) -> str | None:
    """Hand ``state`` over on ``sock``; why it did not come about, None when the other side has taken it.

    Waits for at most :data:`HAND_OVER_SECONDS`.
    """
    deadline = time.monotonic() + HAND_OVER_SECONDS
    try:
        body = _encoder.encode(state)
        _send(sock, coding.encode(messages.Handing(len(body), len(descriptors))), deadline)
        for start in range(0, len(descriptors), _AT_ONCE):
            sock.settimeout(_left(deadline))
            socket.send_fds(sock, [b"\0"], list(descriptors[start : start + _AT_ONCE]))
        _send(sock, body, deadline)
        reason = _taken(_receive_frame(sock, deadline))
    except TimeoutError:
        reason = f"the new process was not ready within {HAND_OVER_SECONDS:.0f} s"
    except OSError as error:
        reason = f"the new process ended: {error.strerror or error}"
    except (EmsError, msgspec.MsgspecError) as error:
        reason = str(error)
    return reason and _last_look(sock, reason)


def _last_look(sock: socket.socket, reason: str) -> str | None:
    """From now on nobody can send ``Taken`` any more; was it sent before that?"""
    try:
        sock.shutdown(socket.SHUT_RD)
        sock.settimeout(0)
        return _taken(_receive_frame(sock, time.monotonic() + 1.0))
    except (OSError, EmsError):
        return reason


def _taken(body: bytes) -> str | None:
    message = coding.decode_request(body)
    return None if isinstance(message, messages.Taken) else f"the new process answered {type(message).__name__}"


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        if sock.gettimeout() != 0:
            sock.settimeout(_left(deadline))
        data = sock.recv(min(count - len(received), _READ_SIZE))
        if not data:
            raise ConnectionResetError("the connection was closed")
        received += data
    return bytes(received)


def _receive_frame(sock: socket.socket, deadline: float) -> bytes:
    """One frame and nothing behind it: descriptors may be attached to what follows."""
    length = int.from_bytes(_receive_exactly(sock, _HEAD, deadline), "big")
    if length > framing.MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes, expected at most {framing.MAX_FRAME}")
    return _receive_exactly(sock, length, deadline)


class Inheritance:
    """What the node on the socket ``path`` hands over to this process.

    It is this process's only after :meth:`accept`; until then the old node may go on.

    Raises:
        PoolUnavailable: no node answers.
        VersionMismatch: the two releases cannot hand over to each other.
        ConfigError: it was refused, or did not come about.
    """

    def __init__(self, path: Path, timeout: float = 2 * HAND_OVER_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.descriptors: list[int] = []
        try:
            self._sock.settimeout(_left(deadline))
            self._sock.connect(str(path))
            self.state = self._receive(deadline)
        except OSError as error:
            self.close()
            raise PoolUnavailable(f"no pool node on {path} could be taken over: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self.config = self._config()

    def _receive(self, deadline: float) -> HandOver:
        hello = messages.Hello(
            greeting.OLDEST_VERSION, greeting.NEWEST_VERSION, "successor", os.getpid(), [greeting.ADMINISTERS]
        )
        welcome = self._ask(hello, deadline)
        if isinstance(welcome, messages.Welcome) and greeting.HANDS_OVER not in welcome.features:
            raise VersionMismatch(
                f"the node (release {welcome.release}) cannot hand over, stop it with 'ems stop' and start the new "
                "one; its pages stay"
            )
        handing = self._ask(messages.TakeOver(VERSION, VERSION, ems.__version__), deadline)
        if not isinstance(handing, messages.Handing):
            raise ProtocolError(f"the node answered {type(handing).__name__}, expected that it hands over")
        while len(self.descriptors) < handing.descriptors:
            self._sock.settimeout(_left(deadline))
            data, received, _, _ = socket.recv_fds(self._sock, 1, _AT_ONCE)
            if not data or not received:
                raise ConnectionResetError("the node stopped handing over")
            for descriptor in received:
                os.set_inheritable(descriptor, False)
            self.descriptors += received
        try:
            state = msgspec.msgpack.decode(_receive_exactly(self._sock, handing.length, deadline), type=HandOver)
        except msgspec.MsgspecError as error:
            raise VersionMismatch(f"this release does not understand what the node hands over: {error}") from error
        if state.format != FORMAT_VERSION:
            raise VersionMismatch(
                f"the node's segments have format {state.format}, this release has {FORMAT_VERSION}; stop the node "
                "with 'ems stop' and start the new one, which begins with an empty pool"
            )
        return state

    def _ask(self, message: messages.Message, deadline: float) -> messages.Answer:
        _send(self._sock, coding.encode(message), deadline)
        answer = coding.decode_answer(_receive_frame(self._sock, deadline))
        if isinstance(answer, messages.Refused):
            refusals.raise_refusal(answer)
        return answer

    def _config(self) -> NodeConfig:
        try:
            return msgspec.convert(self.state.config, NodeConfig, dec_hook=lambda kind, value: kind(value))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"this release does not know the node's settings: {error}") from error

    def accept(self) -> None:
        """The node is this process's from now on.

        Raises:
            PoolUnavailable: the old node did not wait for so long and goes on.
        """
        try:
            self._sock.settimeout(1.0)
            self._sock.sendall(coding.encode(messages.Taken()))
        except OSError as error:
            raise PoolUnavailable("the node did not wait for its successor and goes on by itself") from error
        self._sock.close()

    def close(self) -> None:
        """Let go of everything without taking it."""
        self._sock.close()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors.clear()
