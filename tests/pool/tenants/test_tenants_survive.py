"""Tenants and their pages over the end of their node, a hand-over, and a tenant that writes into its segments."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ems.errors import PoolUnavailable, Unauthorised
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol import coding, greeting, messages
from ems.pool.segments.layout import HEADERS_OFFSET, Description, pack_description, unpack_description
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants import scram
from ems.pool.tenants.credentials import Credentials
from ems.testing.node import NodeProcess
from ems.testing.waiting import until
from tests.pool.brain import chain
from tests.pool.tenants.people import ANN, BOB, registry_of, save
from tests.pool.wire import wire

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


def store(client: PoolClient, payload: bytes) -> None:
    reserved = client.reserve(SPACE, bytes(16), KEYS)
    segments = client.segments(client.epoch)
    for ref in reserved.granted.values():
        segments.page(ref, PAGE)[:] = payload * PAGE
    client.commit(reserved)


def load(client: PoolClient) -> list[bytes]:
    """The first byte of each page that its reader believes."""
    hits = client.lookup(SPACE, JOINED, lease=True)
    if hits.lease is None:
        return []
    reader = client.reader(SPACE, client.epoch)
    found = [
        bytes(reader.page(ref)[:1])
        for key, ref in zip(KEYS, hits.lease.refs, strict=False)
        if reader.holds(ref, key) and reader.sound(ref, key)
    ]
    client.release(hits.lease)
    return found


def restarted(node: NodeProcess) -> None:
    node.kill()
    node.start()


def test_pages_are_back_for_their_tenant_and_nobody_else(node: NodeProcess, connect: Connect) -> None:
    store(connect(ANN), b"a")
    restarted(node)
    assert connect(BOB).lookup(SPACE, JOINED).count == 0
    assert load(connect(ANN)) == [b"a"] * 3
    bob = connect(BOB)

    def stored() -> bool:
        """Memory that was there before is replaced first, and not granted before it was touched."""
        store(bob, b"b")
        return load(bob) == [b"b"] * 3

    until(stored, "bob has memory of his own")
    assert load(connect(ANN)) == [b"a"] * 3


def test_a_segment_that_claims_to_be_another_tenants_is_not_believed(node: NodeProcess, connect: Connect) -> None:
    """A tenant can write into its segments, their description too: it could leave pages for others."""
    ann = connect(ANN)
    store(ann, b"e")
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
    store(connect(BOB), b"b")
    assert load(connect(BOB)) == [b"b"] * 3


def test_an_open_node_has_nothing_of_the_tenants_that_were_there(node: NodeProcess, connect: Connect) -> None:
    store(connect(ANN), b"a")
    node.kill()
    with_tenants, node._flags = node._flags, ("--size", "1MB", "--segment-size", "256KB")
    node.start()
    client = PoolClient(node.socket)
    with contextlib.closing(client):
        assert client.lookup(SPACE, JOINED).count == 0
        store(client, b"o")
        assert load(client) == [b"o"] * 3
    node.kill()
    node._flags = with_tenants
    node.start()
    assert connect(ANN).lookup(SPACE, JOINED).count == 0
    until(lambda: node.figures()["segments_assigned"] == 0, "what an open node left is nobody's and goes")


def test_clients_stay_who_they_are_while_the_process_changes(node: NodeProcess, connect: Connect, path: Path) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store(ann, b"a")
    store(bob, b"b")
    start = ann.changes(None, [SPACE.name]).place
    lease = ann.lookup(SPACE, JOINED, lease=True).lease
    assert lease is not None
    epochs = ann.epoch, bob.epoch
    node.send(signal.SIGHUP)
    until(lambda: "took over" in node.log or "ERROR" in node.log, "another process is the node")
    successor = node.figures()["pid"]
    try:
        assert load(ann) == [b"a"] * 3
        assert load(bob) == [b"b"] * 3
        ann.release(lease)
        assert ann.stats()["tenant"] == "ann"
        told = ann.changes(start, [SPACE.name])
        assert (told.lost, told.runs) == (False, ())
        assert (ann.epoch, bob.epoch) == epochs
        revoked = save(path, tenancy.revoke_key(registry_of(ANN, BOB), "ann", "all"))
        until(lambda: node.figures()["tenants"]["revision"] == revoked.revision, "the new process obeys the file")
        with pytest.raises((Unauthorised, PoolUnavailable)):
            ann.lookup(SPACE, JOINED)
        with pytest.raises(Unauthorised):
            ann.lookup(SPACE, JOINED)
        assert load(bob) == [b"b"] * 3
    finally:
        os.kill(successor, signal.SIGTERM)
        until(lambda: not node.socket.exists(), "the new process ended")


def test_a_greeting_goes_on_while_the_process_changes(node: NodeProcess) -> None:
    """The process changes between the question for a proof and the proof."""
    hello = messages.Hello(1, 1, "raw", os.getpid(), [], ANN.access_id, os.urandom(greeting.NONCE_BYTES))
    with wire(node.socket, greeted=False) as right, wire(node.socket, greeted=False) as wrong:
        asked = [one.ask(hello) for one in (right, wrong)]
        node.send(signal.SIGHUP)
        until(lambda: "took over" in node.log or "ERROR" in node.log, "another process is the node")
        try:
            for one, challenge, key in zip((right, wrong), asked, (ANN.access_key, BOB.access_key), strict=True):
                assert isinstance(challenge, messages.Challenge)
                signed = scram.transcript(coding.body(hello), coding.body(challenge))
                proof = scram.prove(key, challenge.salt, challenge.iterations, signed)
                answer = one.ask(messages.Prove(proof.proof))
                if one is right:
                    assert isinstance(answer, messages.Welcome)
                    assert scram.same(answer.signature, proof.signature)
                    assert isinstance(right.ask(messages.Open(SPACE.name, PAGE)), messages.Opened)
                else:
                    assert isinstance(answer, messages.Refused)
                    assert answer.code == "unauthorised"
        finally:
            os.kill(node.figures()["pid"], signal.SIGTERM)
            until(lambda: not node.socket.exists(), "the new process ended")
