"""Tenants and their pages over the end of their node, a hand-over, and a tenant that writes into its segments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ems.errors import Unauthorised
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.layout import HEADERS_OFFSET, Description, pack_description, unpack_description
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants.scram import Credentials
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.stored_pages import first_bytes, store_filled
from tests.pool.tenants.people import ANN, BOB, registry_of, save

pytestmark = pytest.mark.process

PAGE = 4096
SPACE = Namespace("default/model/layout", PAGE)
KEYS = chain("x", 3)
JOINED = b"".join(KEYS)

Connect = Callable[[Credentials], PoolClient]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "tenants.json", registry_of(ANN, BOB))
    return tmp_path / "tenants.json"


@pytest.fixture
def node(path: Path) -> Iterator[NodeProcess]:
    with NodeProcess("--size", "1MB", "--segment-size", "256KB", "--tenants", str(path)) as running:
        running.wait_touched()
        yield running


@pytest.fixture
def connect(node: NodeProcess) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def make(who: Credentials) -> PoolClient:
            client = node.client("test", who)
            stack.callback(client.close)
            return client

        yield make


def restarted(node: NodeProcess) -> None:
    node.kill()
    node.start()


def test_pages_are_back_for_their_tenant_and_nobody_else(node: NodeProcess, connect: Connect) -> None:
    store_filled(connect(ANN), SPACE, KEYS, b"a")
    restarted(node)
    assert connect(BOB).lookup(SPACE, JOINED).count == 0
    assert first_bytes(connect(ANN), SPACE, KEYS) == [b"a"] * 3
    bob = connect(BOB)

    def stored() -> bool:
        """Memory that was there before is replaced first, and not granted before it was touched."""
        store_filled(bob, SPACE, KEYS, b"b")
        return first_bytes(bob, SPACE, KEYS) == [b"b"] * 3

    until(stored, "bob has memory of his own")
    assert first_bytes(connect(ANN), SPACE, KEYS) == [b"a"] * 3


def test_a_segment_that_claims_to_be_another_tenants_is_not_believed(node: NodeProcess, connect: Connect) -> None:
    """A tenant can write into its segments, their description too: it could leave pages for others."""
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"e")
    (number,) = {ref.segment for ref in ann.lookup(SPACE, JOINED, lease=True).lease.refs}  # type: ignore[union-attr]
    segment = ann.segments(ann.epoch).segment(number)
    told = unpack_description(bytes(segment[:HEADERS_OFFSET]), len(segment))
    assert isinstance(told, Description)
    forged = Description(
        told.segment, f"//bob/{SPACE.name}", told.node_id, told.geometry, told.carving, told.generation
    )
    segment[:HEADERS_OFFSET] = pack_description(forged)
    restarted(node)
    assert "say that they belong to somebody else" in node.log
    assert connect(BOB).lookup(SPACE, JOINED).count == 0
    assert connect(ANN).lookup(SPACE, JOINED).count == 0
    store_filled(connect(BOB), SPACE, KEYS, b"b")
    assert first_bytes(connect(BOB), SPACE, KEYS) == [b"b"] * 3


def test_an_open_node_has_nothing_of_the_tenants_that_were_there(node: NodeProcess, connect: Connect) -> None:
    store_filled(connect(ANN), SPACE, KEYS, b"a")
    node.kill()
    with_tenants, node._flags = node._flags, ("--size", "1MB", "--segment-size", "256KB")
    node.start()
    client = PoolClient(node.socket)
    with contextlib.closing(client):
        assert client.lookup(SPACE, JOINED).count == 0
        store_filled(client, SPACE, KEYS, b"o")
        assert first_bytes(client, SPACE, KEYS) == [b"o"] * 3
    node.kill()
    node._flags = with_tenants
    node.start()
    assert connect(ANN).lookup(SPACE, JOINED).count == 0
    until(lambda: node.figures()["segments_assigned"] == 0, "what an open node left is nobody's and goes")


def test_clients_stay_who_they_are_over_an_upgrade(node: NodeProcess, connect: Connect, path: Path) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, SPACE, KEYS, b"a")
    store_filled(bob, SPACE, KEYS, b"b")
    start = ann.changes(None, [SPACE.name]).place
    node.upgrade()
    assert first_bytes(ann, SPACE, KEYS) == [b"a"] * 3
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    assert ann.stats()["tenant"] == "ann"
    assert ann.changes(start, [SPACE.name]).lost
    revoked = save(path, tenancy.revoke_key(registry_of(ANN, BOB), "ann", "all"))
    until(lambda: node.figures()["tenants"]["revision"] == revoked.revision, "it obeys the file")
    for _ in range(2):
        with pytest.raises(Unauthorised):
            ann.lookup(SPACE, JOINED)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
