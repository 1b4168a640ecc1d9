"""A process that was to become the node and does not: the folder and all in it stay the living node's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from ems.errors import ConfigError, PoolUnavailable
from ems.pool.core.handover import HandOver
from ems.pool.core.room import Outcome
from ems.pool.node.listener import Listener
from ems.pool.node.pool_node import Node
from ems.pool.node.succession import Inheritance
from ems.pool.segments.folder import Folder
from tests.pool.brain import chain, key
from tests.pool.tenants.test_memory_of_others import reserve, start


@pytest.fixture
def home() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="ems-test-") as folder:
        yield Path(folder)


@pytest.fixture(params=[0, 1], ids=["an empty node", "a node with pages"])
def node(home: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node that listens, with so many pages."""
    running = start(home, None)
    running._listener = Listener(running.config.socket)
    if request.param:
        reserve(running, "m", [key("x")])
    before = sorted(home.rglob("*"))
    yield running
    assert sorted(home.rglob("*")) == before
    with pytest.raises(ConfigError, match="already running"):
        Folder(running.config.directory, patience=0.0)
    assert reserve(running, "m", chain("y", 2)) == [Outcome.GRANTED] * 2
    running._listener.close()
    running.arena.close(keep=False)


@pytest.fixture
def inheritance(node: Node) -> Iterator[Inheritance]:
    """What ``node`` hands over to a process for which it does not wait any more."""
    state, descriptors = node._handing(0)
    late = Inheritance.__new__(Inheritance)
    late._sock, other = socket.socketpair()
    other.close()
    late.state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=HandOver)
    late.descriptors = [os.dup(descriptor) for descriptor in descriptors]
    late.config = late._config()
    yield late
    late.close()


def test_a_successor_that_comes_too_late_leaves_the_folder_as_it_is(inheritance: Inheritance) -> None:
    async def succeed() -> None:
        successor = Node(inheritance.config, inheritance=inheritance)
        try:
            successor.start()
        finally:
            successor.close()

    with pytest.raises(PoolUnavailable, match="did not wait for its successor"):
        asyncio.run(succeed())


def test_a_successor_whose_tiers_cannot_be_opened_leaves_the_folder_as_it_is(inheritance: Inheritance) -> None:
    async def succeed() -> None:
        config = msgspec.structs.replace(inheritance.config, tiers=("s3://nowhere?unknown=1",))
        Node(config, inheritance=inheritance)

    with pytest.raises(ConfigError):
        asyncio.run(succeed())
