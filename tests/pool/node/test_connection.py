"""A connection of the node in virtual time, with nothing behind it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from ems.pool.node.connection import Connection
from ems.pool.protocol import coding, messages
from ems.pool.protocol.coding import FrameReader
from ems.pool.protocol.limits import FRAME_SECONDS, GREETING_SECONDS
from ems.pool.service.storing import Steps
from ems.pool.tenants.gate import Peer, Pending, Principal

if TYPE_CHECKING:
    from ems.pool.node.pool_node import Node


class AdminService:
    """A host whose every answer is a defect."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.clients = self.rounds = self.arena = self.tenancy = self.gate = self
        self.gone: list[tuple[int, str | None]] = []
        self.time = 100.0
        self.pins: list[int] = []

    def clock(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def keeps(self, client_id: int, size: int) -> None:
        self.pins.append(size)

    def has_work(self, connection: Connection) -> None:
        connection.turn()
        while connection.busy:
            connection.turn()

    def greet(self, hello: messages.Hello, body: bytes, peer: Peer, now: float) -> Principal | Pending:
        return Principal()

    def prove(self, pending: Pending, proof: bytes, peer: Peer, now: float, wall: float) -> tuple[Principal, bytes]:
        raise AssertionError

    def welcome(self, client_id: int, principal: Principal, version: int, signature: bytes) -> messages.Welcome:
        return messages.Welcome(version, "node", "1.0", autostarted=False, segments=0)

    def answer(self, client_id: int, request: messages.Request) -> messages.Answer | None:
        raise ZeroDivisionError

    def opened(self, segment: int) -> int:
        raise AssertionError

    def answered(self) -> None:
        pass

    def known(self, client_id: int) -> Principal:
        return Principal()

    def forget(self, client_id: int, reason: str | None) -> None:
        self.gone.append((client_id, reason))


@pytest.fixture
async def service() -> AdminService:
    return AdminService()


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
    service: AdminService, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, its = ends
    connection = Connection(cast("Node", service), its, 7, now=100.0)
    connection.check_deadlines(100.0 + GREETING_SECONDS - 0.01)
    assert service.gone == []
    connection.check_deadlines(100.0 + GREETING_SECONDS)
    (refused,) = received(mine)
    assert refused == messages.Refused("protocol", "the client did not greet within 5 s")
    assert service.gone == [(7, "the client did not greet within 5 s")]


async def test_who_has_greeted_may_stay_for_ever(
    service: AdminService, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, its = ends
    connection = Connection(cast("Node", service), its, 7, now=0.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())))
    connection.on_readable()
    connection.check_deadlines(1e9)
    assert service.gone == []
    mine.close()
    connection.on_readable()
    assert service.gone == [(7, None)]


async def test_a_defect_costs_the_connection_that_found_it(
    service: AdminService, ends: tuple[socket.socket, socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    mine, its = ends
    connection = Connection(cast("Node", service), its, 7, now=0.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())) + coding.encode(messages.Stats()))
    connection.on_readable()
    welcome, refused = received(mine)
    assert isinstance(welcome, messages.Welcome)
    assert isinstance(refused, messages.Refused)
    assert "has a defect" in refused.reason
    assert service.gone == [(7, refused.reason)]
    assert "ZeroDivisionError" in capsys.readouterr().out


async def test_a_frame_that_is_begun_has_to_end_in_time(
    service: AdminService, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, its = ends
    connection = Connection(cast("Node", service), its, 7, now=100.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())))
    connection.on_readable()
    for at in (103.0, 109.0):  # coming in drops does not help
        service.time = at
        mine.sendall((coding.MAX_FRAME).to_bytes(4, "big"))
        connection.on_readable()
    assert service.pins == [4, 8]
    connection.check_deadlines(103.0 + FRAME_SECONDS - 0.01)
    assert service.gone == []
    connection.check_deadlines(103.0 + FRAME_SECONDS)
    _, refused = received(mine)
    assert refused == messages.Refused("protocol", "a frame was begun and not finished within 10 s")
    assert service.gone == [(7, "a frame was begun and not finished within 10 s")]


async def test_whole_frames_have_no_deadline_together(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, its = ends
    registrar = Registrar()
    connection = Connection(cast("Node", registrar), its, 7, now=100.0)
    stats = coding.encode(messages.Stats())
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())) + stats[:3])
    for _ in range(5):
        connection.on_readable()
        registrar.time += FRAME_SECONDS - 1
        connection.check_deadlines(registrar.time)
        mine.sendall(stats[3:] + stats[:3])
    assert registrar.gone == []
    mine.sendall(stats[3:])
    connection.on_readable()
    connection.check_deadlines(1e9)
    assert registrar.gone == []


class Registrar(AdminService):
    """A host that answers with figures, as far as it is asked for them."""

    def answer(self, client_id: int, request: messages.Request) -> messages.Answer | None:
        return messages.Figures({"owner": client_id}) if isinstance(request, messages.Stats) else None


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
    connection = Connection(cast("Node", Registrar()), its, 7, now=100.0)
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
    connection = Connection(cast("Node", Registrar()), its, 7, now=100.0)
    mine.sendall(coding.encode(messages.Hello(1, 1, "test", os.getpid())))
    stats = coding.encode(messages.Stats())
    mine.sendall(stats + stats + coding.frame(b"nonsense") + stats)
    connection.on_readable()
    kinds = [type(answer) for answer in received(mine)]
    assert kinds == [messages.Welcome, messages.Figures, messages.Figures, messages.Refused]


class Waits(AdminService):
    """A host whose answers wait until they are woken."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes: list[Callable[[], None]] = []

    def answer(self, client_id: int, request: messages.Request) -> Steps[messages.Answer]:  # type: ignore[override]
        def steps() -> Steps[messages.Answer]:
            yield self.wakes.append
            yield None
            return messages.Done(len(self.wakes))

        return steps()


@pytest.fixture
async def waits() -> Waits:
    return Waits()


async def test_what_waits_goes_on_when_it_is_woken_and_what_came_behind_it_follows(
    waits: Waits, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, its = ends
    connection = Connection(cast("Node", waits), its, 7, now=0.0)
    hello = messages.Hello(1, coding.NEWEST_VERSION, "test", os.getpid())
    mine.sendall(b"".join(map(coding.encode, (hello, messages.Stats(), messages.Stats()))))
    connection.on_readable()
    assert len(waits.wakes) == 1
    assert not connection.busy, "it takes no turns of others"
    waits.wakes[0]()
    assert len(waits.wakes) == 2
    waits.wakes[1]()
    mine.shutdown(socket.SHUT_WR)
    connection.on_readable()
    assert received(mine)[1:] == [messages.Done(1), messages.Done(2)]
    assert waits.gone == [(7, None)]


async def test_what_waits_ends_with_its_connection(waits: Waits, ends: tuple[socket.socket, socket.socket]) -> None:
    mine, its = ends
    connection = Connection(cast("Node", waits), its, 7, now=0.0)
    hello = messages.Hello(1, coding.NEWEST_VERSION, "test", os.getpid())
    mine.sendall(coding.encode(hello) + coding.encode(messages.Stats()))
    connection.on_readable()
    connection.close("it has to go")
    waits.wakes[0]()
    assert waits.gone == [(7, "it has to go")]
    assert len(received(mine)) == 1, "the greeting alone"
