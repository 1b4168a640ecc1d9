"""A connection of the node in virtual time, with nothing behind it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ems.pool.node.connection import Connection
from ems.pool.protocol import coding, framing, messages
from ems.pool.protocol.framing import FrameReader
from ems.pool.protocol.greeting import GREETING_SECONDS
from ems.pool.tenants.gate import Guest, Peer, Pending


class Desk:
    """A host whose every answer is a defect."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gone: list[tuple[int, str | None]] = []

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer) -> Guest | Pending:
        return Guest()

    def prove(self, pending: Pending, proof: bytes, peer: Peer) -> tuple[Guest, bytes]:
        raise AssertionError

    def welcome(self, owner: int, guest: Guest, version: int, signature: bytes) -> messages.Welcome:
        return messages.Welcome(version, "node", "1.0", autostarted=False, segments=0)

    def answer(self, owner: int, request: messages.Request) -> messages.Answer | None:
        raise ZeroDivisionError

    def opened(self, segment: int) -> int:
        raise AssertionError

    def answered(self) -> None:
        pass

    def known(self, owner: int) -> Guest:
        return Guest()

    def forget(self, owner: int, reason: str | None) -> None:
        self.gone.append((owner, reason))


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, its = socket.socketpair()
    mine.settimeout(5.0)
    its.setblocking(False)
    with mine, its:
        yield mine, its


def received(sock: socket.socket) -> list[messages.Answer]:
    """All answers until the end of the connection."""
    reader = FrameReader()
    while data := sock.recv(1 << 16):
        reader.feed(data)
    return [coding.decode_answer(body) for body in reader.frames()]


async def test_who_does_not_greet_in_time_is_told_and_let_go(
    desk: Desk, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, its = ends
    connection = Connection(desk, its, 7, now=100.0)
    connection.check_greeting(100.0 + GREETING_SECONDS - 0.01)
    assert desk.gone == []
    connection.check_greeting(100.0 + GREETING_SECONDS)
    (refused,) = received(mine)
    assert refused == messages.Refused("protocol", "the client did not greet within 5 s")
    assert desk.gone == [(7, "the client did not greet within 5 s")]


async def test_who_is_to_greet_may_take_its_time_anew_when_the_process_changed(
    desk: Desk, ends: tuple[socket.socket, socket.socket]
) -> None:
    _, its = ends
    state = Connection(desk, its, 7, now=100.0).snapshot()
    connection = Connection(desk, its, 7, now=100.0 + 3 * GREETING_SECONDS)
    connection.resume(state)
    connection.check_greeting(100.0 + 4 * GREETING_SECONDS - 0.01)
    assert desk.gone == []
    connection.check_greeting(100.0 + 4 * GREETING_SECONDS)
    assert len(desk.gone) == 1


async def test_who_has_greeted_may_stay_for_ever(desk: Desk, ends: tuple[socket.socket, socket.socket]) -> None:
    mine, its = ends
    connection = Connection(desk, its, 7, now=0.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())))
    connection.on_readable()
    connection.check_greeting(1e9)
    assert desk.gone == []
    mine.close()
    connection.on_readable()
    assert desk.gone == [(7, None)]


async def test_a_defect_costs_the_connection_that_found_it(
    desk: Desk, ends: tuple[socket.socket, socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    mine, its = ends
    connection = Connection(desk, its, 7, now=0.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())) + coding.encode(messages.Stats()))
    connection.on_readable()
    welcome, refused = received(mine)
    assert isinstance(welcome, messages.Welcome)
    assert isinstance(refused, messages.Refused)
    assert "has a defect" in refused.reason
    assert desk.gone == [(7, refused.reason)]
    assert "ZeroDivisionError" in capsys.readouterr().out


class Registrar(Desk):
    """A host that answers with figures, as far as it is asked for them."""

    def answer(self, owner: int, request: messages.Request) -> messages.Answer | None:
        return messages.Figures({"owner": owner}) if isinstance(request, messages.Stats) else None


class Counting(socket.socket):
    """Keeps what is sent, call by call."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.sent: list[bytes] = []

    def send(self, data: Any, flags: int = 0) -> int:
        self.sent.append(bytes(data))
        return super().send(data, flags)


def frames(data: bytes) -> int:
    reader = FrameReader()
    reader.feed(data)
    return len(list(reader.frames()))


async def test_answers_to_requests_that_came_together_leave_together(ends: tuple[socket.socket, socket.socket]) -> None:
    """A client that is woken by the first answer may take the processor that the second one needs."""
    mine, its = ends[0], Counting(ends[1])
    connection = Connection(Registrar(), its, 7, now=100.0)
    stats, quiet = coding.encode(messages.Stats()), coding.encode(messages.Release(1))
    for requests, answers in (
        ([coding.encode(messages.Hello(1, 1, "test", os.getpid()))], [1]),
        ([stats] * 3, [3]),
        ([stats, quiet], [1]),
        ([quiet, stats, quiet, stats], [2]),
        ([quiet], []),
        ([stats, stats[:3]], [1]),
        ([stats[3:]], [1]),
    ):
        its.sent.clear()
        mine.sendall(b"".join(requests))
        connection.on_readable()
        assert [frames(data) for data in its.sent] == answers
    its.close()


async def test_what_was_asked_before_nonsense_is_answered_before_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    mine, its = ends
    connection = Connection(Registrar(), its, 7, now=100.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())))
    stats = coding.encode(messages.Stats())
    mine.sendall(stats + stats + framing.frame(b"nonsense") + stats)
    connection.on_readable()
    kinds = [type(answer) for answer in received(mine)]
    assert kinds == [messages.Welcome, messages.Figures, messages.Figures, messages.Refused]
