"""What a worker asks the others, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import closing, suppress

import pytest

from ems.http.address import Address
from ems.router.app import Page, Router
from ems.router.config import RouterConfig
from ems.router.fleet import Role
from ems.router.pages import read_change
from ems.router.workers import messages
from ems.router.workers.link import Link
from ems.router.workers.messages import Answer, Ask, Change
from ems.router.workers.parent import Post


async def test_of_a_question_whose_asker_has_left_nothing_stays() -> None:
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with closing(near), closing(far):
        link = Link(Post(0, near, {}), 60.0, lambda: None)
        link.shares.others[1] = {}
        asking = asyncio.create_task(link.ask("metrics"))
        question = messages.decode((await asyncio.to_thread(far.recv, 4096))[1:])
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

        assert not link._waiting
        assert isinstance(question, Ask)
        link._take(1, memoryview(messages.encode(Answer(question.number, b"page"))))


async def test_an_answer_to_a_worker_that_is_gone_answers_no_question_of_its_successor() -> None:
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with closing(near), closing(far):
        numbers = []
        for _ in range(2):
            await Link(Post(0, near, {}), 60.0, lambda: None).ask("metrics")
            question = messages.decode(far.recv(4096)[1:])
            assert isinstance(question, Ask)
            numbers.append(question.number)

    assert numbers[0] != numbers[1]


async def test_a_worker_that_follows_another_one_does_not_log_old_changes_as_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    kept, gone = Address("127.0.0.1", 7101), Address("127.0.0.1", 7102)
    changes = {
        "kept": Change(1, Role.DECODE, [kept], listed=True),
        "gone": Change(2, Role.DECODE, [gone], listed=False),
    }
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    near.setblocking(False)
    with closing(near), closing(far):
        link = Link(Post(1, near, changes), 60.0, lambda: None)
        async with Router(RouterConfig(decodes=(gone,)), link=link) as router:
            link.open()
            asyncio.get_running_loop().remove_reader(near)

            assert [one.address for one in router.fleet.listed(Role.DECODE)] == [kept]
    assert "Added" not in caplog.text
    assert "Removed" not in caplog.text


def test_the_largest_change_of_instances_has_room_in_a_packet() -> None:
    limit = Page._field_defaults["body_limit"]
    names = [f"a:{10_000 + number}" for number in range(limit // 10 - 10)]
    body = json.dumps({"type": "decode", "instances": names}, separators=(",", ":")).encode()
    assert limit - 100 < len(body) <= limit
    role, addresses = read_change(body)

    assert len(messages.encode(Change(1 << 32, role, addresses, listed=True))) < messages.LARGEST
    assert len(", ".join(names)) < messages.LARGEST - 1024, "what is said of it"
