"""Real nodes: one that a module's tests share, and fresh ones for tests that hurt theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from tests.kit.node import NodeProcess

PAGE = 4096

MakeNode = Callable[..., NodeProcess]
MakeClient = Callable[..., PoolClient]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A small node that all tests of a module share; none may end it."""
    with NodeProcess("--size", "16MB", "--segment-size", "64KB") as running:
        running.wait_touched()
        yield running
        assert running.returncode is None, f"the shared node ended: {running.log}"
        assert "Traceback" not in running.log, running.log


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Start a node of one's own with the given flags."""
    with ExitStack() as stack:

        def make(*flags: str) -> NodeProcess:
            return stack.enter_context(NodeProcess(*(flags or ("--size", "16MB", "--segment-size", "64KB"))))

        yield make


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """A client of a node, closed at the end of the test."""
    with ExitStack() as stack:

        def make(node: NodeProcess, name: str = "test", **options: Any) -> PoolClient:
            client = node.client(name, **options)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def client(node: NodeProcess, make_client: MakeClient) -> PoolClient:
    """A client of the shared node."""
    return make_client(node)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """A namespace that no other test uses."""
    return Namespace(f"test/{request.node.name}"[:200], PAGE)
