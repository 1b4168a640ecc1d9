"""Announcements over the wire."""

from __future__ import annotations

import pytest

from ems.config import POLICIES
from ems.pool.client.answers import Namespace
from tests.pool.brain import chain
from tests.pool.conftest import MakeClient, MakeNode
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


def test_nothing_is_announced_where_nothing_was_stored(make_node: MakeNode, make_client: MakeClient) -> None:
    client = make_client(make_node())
    assert client.announce(Namespace("unknown", 0), KEYS) is None
