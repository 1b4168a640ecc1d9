"""Connections and bytes of a node's clients: who may come, and who has to end."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ems.config import MIB
from ems.errors import PoolRefused
from ems.pool.node import client_limits
from ems.pool.node.client_limits import GREETING_SHARE, MAX_CLIENTS, ClientLimits, room_for_clients
from ems.pool.protocol import coding, messages
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.wire import wire

ROOM = 40

STEPS = st.lists(
    st.tuples(st.sampled_from(["came", "greeted", "kept", "gone"]), st.integers(0, 60), st.sampled_from("abc"))
)


@given(STEPS)
def test_nobody_has_more_than_its_share_and_all_is_accounted_for(steps: list[tuple[str, int, str]]) -> None:
    limits = ClientLimits()
    greeted: dict[int, str] = {}
    waiting: dict[int, str] = {}
    kept: dict[int, int] = {}
    number = 0
    for step, which, party in steps:
        everybody = [*waiting, *greeted]
        one = everybody[which % len(everybody)] if everybody else None
        ends = None
        if step == "came":
            number += 1
            waiting[number] = party
            ends = limits.came(number, party, ROOM)
            assert ends is None or ends in waiting
        elif one is None:
            continue
        elif step == "greeted" and one in waiting:
            try:
                limits.greeted(one, party, ROOM)
            except PoolRefused:
                ends = one
                assert list(greeted.values()).count(party) >= 15 or len(greeted) >= 30
            else:
                del waiting[one]
                greeted[one] = party
        elif step == "kept":
            kept[one] = which
            assert limits.keeps(one, which) is None
        elif step == "gone":
            ends = one
        if ends is not None:
            limits.gone(ends)
            kept.pop(ends, None)
            waiting.pop(ends, None)
            greeted.pop(ends, None)
        assert len(waiting) <= ROOM // GREETING_SHARE
        assert len(limits) == len(waiting) + len(greeted) <= ROOM
        assert limits.kept == sum(kept.values())


def test_one_user_that_does_not_greet_keeps_nobody_out() -> None:
    limits = ClientLimits()
    limits.came(0, "user 7", ROOM)
    for number in range(1, 100):
        ends = limits.came(number, "user 8", ROOM)
        if ends is not None:
            assert ends == number - ROOM // GREETING_SHARE // 2, "who waited longest"
            limits.gone(ends)
    limits.greeted(0, "tenant ann", ROOM)


def test_one_tenant_has_half_of_the_connections_at_most() -> None:
    limits = ClientLimits()
    for number in range(15):
        limits.came(number, "user 7", ROOM)
        limits.greeted(number, "tenant ann", ROOM)
    limits.came(15, "user 7", ROOM)
    with pytest.raises(PoolRefused, match="15 connections of tenant ann and 15 in all are open"):
        limits.greeted(15, "tenant ann", ROOM)
    limits.greeted(15, "tenant bob", ROOM)


def test_three_hundred_half_frames_are_no_more_than_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "MAX_BUFFERED", 256 * MIB)
    limits = ClientLimits()
    for number in range(301):
        limits.came(number, "user 7", MAX_CLIENTS)
        limits.greeted(number, "tenant bob" if number else "tenant ann", MAX_CLIENTS)
    limits.keeps(0, 4 * MIB)
    ended = []
    for number in range(1, 301):
        for size in (MIB, 2 * MIB):
            ends = limits.keeps(number, size)
            if ends is not None:
                ended.append(ends[0])
                limits.gone(ends[0])
                if ends[0] == number:
                    break
            assert limits.kept <= 256 * MIB
    assert ended
    assert 0 not in ended, "whose tenant has little goes on"


@pytest.mark.parametrize(("descriptors", "room"), [(1 << 20, 1024), (1024, 1024 - 32 - 32 - 100 - 8), (64, 8)])
def test_descriptors_are_left_for_everything_else(descriptors: int, room: int) -> None:
    assert room_for_clients(descriptors, 100, 8) == room


# A real node


def test_half_frames_are_bounded_together_and_others_go_on() -> None:
    with NodeProcess("--size", "1MB") as node, contextlib.ExitStack() as stack:
        client = node.client()
        stack.callback(client.close)
        client.connect()
        process = psutil.Process(node.pid)
        before = process.memory_info().rss
        half = struct.pack(">I", coding.MAX_FRAME) + bytes(2 * MIB)
        for _ in range(150):
            one = stack.enter_context(wire(node.socket))
            with contextlib.suppress(OSError):
                one.send(half)
        client.stats()
        assert process.memory_info().rss - before < 330 * MIB
        until(lambda: "unfinished, under way or unread together" in node.log, "the node says so")
        client.stats()


def greeting_begun(path: Path, said: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))  # waits where many wait to be accepted
    with contextlib.suppress(OSError):
        sock.sendall(said)
    return sock


HELLO = coding.encode(messages.Hello(1, 1, "half", os.getpid()))


@pytest.mark.parametrize("said", [b"", HELLO[:3], HELLO[:-1]], ids=["nothing", "a length", "half"])
def test_half_greetings_keep_nobody_out(said: bytes) -> None:
    """Many more than the node may have open files, which is no warning in its log either."""
    with NodeProcess("--size", "1MB") as node, contextlib.ExitStack() as stack:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (160, 160))
        for _ in range(300):
            stack.enter_context(greeting_begun(node.socket, said))
        client = node.client()
        stack.callback(client.close)
        client.connect()
        client.stats()
        assert "cannot accept" not in node.log
        assert len(list(Path(f"/proc/{node.pid}/fd").iterdir())) < 128
        assert "too many connections have not greeted" in node.log


def test_more_clients_than_there_is_room_for_are_told_so() -> None:
    with NodeProcess("--size", "1MB") as node, contextlib.ExitStack() as stack:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (160, 160))
        refused = None
        for _ in range(100):
            one = stack.enter_context(wire(node.socket, greeted=False))
            answer = one.ask(messages.Hello(1, 1, "many", os.getpid()))
            if isinstance(answer, messages.Refused):
                refused = answer
                break
        assert refused is not None
        assert "connections of user" in refused.reason
        assert "expected at most" in refused.reason
        administrator = stack.enter_context(wire(node.socket, greeted=False))
        answer = administrator.ask(messages.Hello(1, 1, "ems status", os.getpid(), administers=True))
        assert isinstance(answer, messages.Welcome), "who looks after the node comes in"
