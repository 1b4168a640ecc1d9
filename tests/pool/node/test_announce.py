"""Announcements over the wire: a node that takes them, and one of an earlier release."""

from __future__ import annotations

from pathlib import Path

import pytest

from ems.config import POLICIES
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol import coding, messages
from tests.pool.brain import chain
from tests.pool.client.scripted import WELCOME, node_that_says
from tests.pool.conftest import PAGE, MakeClient, MakeNode
from tests.pool.stored_pages import store_unwritten

KEYS = b"".join(chain("x", 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_announced_stays_until_it_is_withdrawn(
    policy: str, make_node: MakeNode, make_client: MakeClient, namespace: Namespace
) -> None:
    node = make_node("--size", "256KB", "--segment-size", "64KB", "--policy", policy)
    node.wait_touched()
    client = make_client(node)
    awaited = chain("awaited", 3)
    store_unwritten(client, namespace, awaited)
    announcement = client.announce(namespace, b"".join(awaited))
    assert announcement is not None
    for name in range(40):
        store_unwritten(client, namespace, chain(f"before {name}", 8))
    assert client.lookup(namespace, b"".join(awaited)).count == 3
    client.withdraw(announcement)
    for name in range(40):
        store_unwritten(client, namespace, chain(f"after {name}", 8))
    assert client.lookup(namespace, b"".join(awaited)).count == 0
    client.withdraw(announcement)


def test_nothing_is_announced_where_nothing_was_stored_or_the_node_is_older(
    tmp_path: Path, make_node: MakeNode, make_client: MakeClient
) -> None:
    client = make_client(make_node())
    assert client.announce(Namespace("unknown", 0), KEYS) is None
    with node_that_says(tmp_path / "s", WELCOME, coding.encode(messages.Opened(0))):
        older = PoolClient(tmp_path / "s")
        assert older.announce(Namespace("a", PAGE), KEYS) is None
        older.close()
