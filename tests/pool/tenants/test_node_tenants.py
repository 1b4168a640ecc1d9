"""A real node with tenants: who is let in, what each can see, what happens to memory that changes hands."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from ems.errors import PoolRefused, PoolUnavailable, StaleReference, Unauthorised
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.core.shares import Quota
from ems.pool.protocol import coding, messages
from ems.pool.tenants import registry as tenancy
from ems.pool.tenants.registry import Registry
from ems.pool.tenants.scram import Credentials
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.stored_pages import first_bytes, store_filled
from tests.pool.tenants.people import ANN, BOB, registry_of, save
from tests.pool.wire import wire

PAGE = 4096
KEYS = chain("x", 3)
JOINED = b"".join(KEYS)

Connect = Callable[[Credentials | None], PoolClient]


class TenantNode:
    """A node with tenants and the file that it reads."""

    def __init__(self, node: NodeProcess, path: Path, registry: Registry) -> None:
        self.node = node
        self.path = path
        self.registry = registry

    def change(self, registry: Registry) -> None:
        """Change the file and wait until the node obeys."""
        self.registry = save(self.path, registry)
        until(lambda: self.node.figures()["tenants"]["revision"] == self.registry.revision, "the node obeys")


@contextlib.contextmanager
def a_place(folder: Path, size: str, segment: str) -> Iterator[TenantNode]:
    path = folder / "tenants.json"
    registry = save(path, registry_of(ANN, BOB))
    with NodeProcess("--size", size, "--segment-size", segment, "--tenants", str(path)) as node:
        node.wait_touched()
        yield TenantNode(node, path, registry)
        assert node.returncode is None, node.log
        assert "Traceback" not in node.log, node.log


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantNode]:
    with a_place(tmp_path_factory.mktemp("tenants"), "4MB", "64KB") as place:
        yield place


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TenantNode]:
    """A node that the tests share; one of its own for a test that changes the file or fills the pool."""
    if request.node.get_closest_marker("usefixtures"):
        with a_place(tmp_path, "1MB", "256KB") as own:
            yield own
    else:
        yield request.getfixturevalue("shared")


@pytest.fixture
def alone() -> None:
    """For tests that need a node of their own."""


own_node = pytest.mark.usefixtures("alone")


@pytest.fixture
def space(request: pytest.FixtureRequest) -> Namespace:
    """A namespace that no other test uses."""
    return Namespace(f"default/{request.node.name}/layout"[:200], PAGE)


@pytest.fixture
def connect(place: TenantNode) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def make(who: Credentials | None) -> PoolClient:
            client = place.node.client("test", who)
            stack.callback(client.close)
            return client

        yield make


def nothing_in(mapped: memoryview) -> bool:
    return not any(mapped)


def test_a_tenant_finds_its_own_pages_and_no_others(connect: Connect, space: Namespace) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, KEYS, b"a")
    assert bob.lookup(space, JOINED).count == 0
    assert store_filled(bob, space, KEYS[:2], b"b") == 2
    assert first_bytes(connect(ANN), space, KEYS) == [b"a"] * 3
    assert first_bytes(connect(BOB), space, KEYS) == [b"b"] * 2


@pytest.mark.parametrize(
    "who",
    [None, Credentials("ann"), Credentials("ann", "wrong"), Credentials("nobody", "ems_x"), Credentials("", "ems_x")],
    ids=repr,
)
def test_without_a_key_there_is_unauthorised_and_nothing_else(
    connect: Connect, who: Credentials | None, space: Namespace
) -> None:
    client = connect(who)
    for _ in range(3):
        with pytest.raises(Unauthorised, match="does not accept these credentials"):
            client.lookup(space, JOINED)
    assert not client.epoch


def test_a_client_that_is_refused_does_not_ask_again_and_again(
    place: TenantNode, connect: Connect, space: Namespace
) -> None:
    client = connect(Credentials("ann", "wrong"))
    before = place.node.figures()["tenants"]["refused"]
    for _ in range(100):
        with pytest.raises(Unauthorised):
            client.lookup(space, JOINED)
    assert place.node.figures()["tenants"]["refused"] == before + 1


def test_before_the_proof_nothing_is_answered(place: TenantNode) -> None:
    hello = messages.Hello(1, 1, "raw", 1, False, "ann", bytes(16))
    for message in (messages.Stats(), messages.Lookup(0, b""), messages.Open("a", 4096), messages.Attach(0)):
        with wire(place.node.socket, greeted=False) as one:
            one.send(message)
            assert "came before the greeting" in one.refusal().reason
        with wire(place.node.socket, greeted=False) as one:
            assert isinstance(one.ask(hello), messages.Challenge)
            one.send(message)
            assert "came before the greeting" in one.refusal().reason
    for sent in ([hello, hello], [messages.Prove(bytes(32))], [hello, messages.Prove(b"")]):
        with wire(place.node.socket, greeted=False) as one:
            one.send(*sent)
            first = one.answer()
            last = one.answer() if isinstance(first, messages.Challenge) else first
            assert isinstance(last, messages.Refused)
            assert last.code == "protocol"
            assert one.answer() is None


def test_a_proof_cannot_be_used_twice(place: TenantNode) -> None:
    """The node's nonce is new each time, so what was overheard proves nothing."""
    hello = messages.Hello(1, 1, "raw", 1, False, "ann", bytes(16))
    asked = []
    for _ in range(2):
        with wire(place.node.socket, greeted=False) as one:
            asked.append(one.ask(hello))
    assert asked[0] != asked[1]


@own_node
def test_segments_of_others_cannot_be_mapped(place: TenantNode, connect: Connect, space: Namespace) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, KEYS, b"a")
    store_filled(bob, space, KEYS, b"b")
    reserved = ann.reserve(space, KEYS[-1], chain("y", 1))
    mine = {ref.segment for ref in reserved.granted.values()}
    ann.commit(reserved)
    for number in {*range(-1, 6)} - mine:
        with pytest.raises(StaleReference, match="holds no page of this tenant"):
            ann.attach(number, ann.epoch)
        ann.lookup(space, JOINED)


@own_node
def test_a_number_of_a_namespace_means_something_to_its_tenant_only(
    connect: Connect, place: TenantNode, space: Namespace
) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, KEYS, b"a")
    bob.connect()
    for number in range(8):
        with pytest.raises(StaleReference, match=f"namespace {number} is not open"), bob.turn(5.0) as turn:
            turn.ask(messages.Lookup(number, JOINED), messages.Hits)
    with pytest.raises(PoolRefused, match="names that begin with '//' are the node's own"):
        bob.open(Namespace("//ann/default/model/layout", PAGE))


def test_figures_are_the_tenants_own(connect: Connect, space: Namespace) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, KEYS, b"a")
    ann.lookup(space, JOINED)
    figures = bob.stats()
    assert space.name not in {row["name"] for row in figures["namespaces"]}  # type: ignore[attr-defined]
    assert set(figures) == {
        "node", "release", "pid", "autostarted", "uptime_seconds", "tenant", "namespaces", "counters",
    }  # fmt: skip
    pages = {row["name"]: row["pages"] for row in ann.stats()["namespaces"]}  # type: ignore[attr-defined]
    assert pages[space.name] == 3
    assert bob.stats()["counters"] == figures["counters"]


def test_changes_are_the_tenants_own(connect: Connect, space: Namespace) -> None:
    ann, bob = connect(ANN), connect(BOB)
    start = bob.changes(None, [space.name]).place
    store_filled(ann, space, KEYS, b"a")
    told = bob.changes(start, [space.name])
    assert (told.place, told.lost, told.runs) == (start, False, ())
    store_filled(bob, space, KEYS[:1], b"b")
    told = bob.changes(start, [space.name])
    assert [(run.namespace, run.stored, run.keys) for run in told.runs] == [(0, True, KEYS[0])]


def test_numbers_of_leases_tell_nothing_of_others(connect: Connect, space: Namespace) -> None:
    ann = connect(ANN)
    store_filled(ann, space, KEYS, b"a")
    leases = [ann.lookup(space, JOINED, lease=True).lease for _ in range(3)]
    numbers = [lease.number for lease in leases if lease]
    assert len({second - first for first, second in pairwise(numbers)}) == 2
    for lease in leases:
        assert lease is not None
        ann.release(lease)


def test_administrators_see_all_and_store_nothing(place: TenantNode, connect: Connect, space: Namespace) -> None:
    store_filled(connect(ANN), space, KEYS, b"a")
    admin = PoolClient(place.node.socket, "admin", administers=True)
    with contextlib.closing(admin):
        assert f"//ann/{space.name}" in {row["name"] for row in admin.stats()["namespaces"]}  # type: ignore[attr-defined]
        with pytest.raises(PoolRefused, match="Open is for tenants"):
            admin.lookup(space, JOINED)


@own_node
def test_a_revoked_key_ends_its_connections_at_once_and_nobody_elses(
    place: TenantNode, connect: Connect, space: Namespace
) -> None:
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, KEYS, b"a")
    store_filled(bob, space, KEYS, b"b")
    assert ann.lookup(space, JOINED, lease=True).lease
    place.change(tenancy.revoke_key(place.registry, "ann", "all"))
    with pytest.raises((Unauthorised, PoolUnavailable)):
        ann.lookup(space, JOINED)
    with pytest.raises(Unauthorised):
        ann.lookup(space, JOINED)
    assert first_bytes(bob, space, KEYS) == [b"b"] * 3
    assert place.node.figures()["leases"] == 0


@own_node
def test_a_rotated_key_goes_on_for_the_overlap(place: TenantNode, connect: Connect, space: Namespace) -> None:
    import time

    ann = connect(ANN)
    store_filled(ann, space, KEYS, b"a")
    place.change(tenancy.rotate_key(place.registry, "ann", "ems_new", time.time(), 1.0))
    assert first_bytes(ann, space, KEYS) == [b"a"] * 3
    assert first_bytes(connect(Credentials("ann", "ems_new")), space, KEYS) == [b"a"] * 3

    def over() -> bool:
        try:
            ann.lookup(space, JOINED)
        except (Unauthorised, PoolUnavailable):
            return True
        return False

    until(over, "the old key is over")
    assert first_bytes(connect(Credentials("ann", "ems_new")), space, KEYS) == [b"a"] * 3


@own_node
def test_a_file_that_makes_no_sense_changes_nothing(place: TenantNode, connect: Connect, space: Namespace) -> None:
    place.path.write_text("{")
    until(lambda: "is no tenants file" in place.node.log, "the node says so")
    assert connect(ANN).lookup(space, JOINED).count == 0


@own_node
def test_memory_that_changes_hands_is_fresh_and_the_old_mapping_is_dead(
    place: TenantNode, connect: Connect, space: Namespace
) -> None:
    ann, bob = connect(ANN), connect(BOB)
    secret = chain("secret", 300)
    assert store_filled(ann, space, secret, b"s") > 100
    old = {number: ann.segments(ann.epoch).segment(number) for number in range(4)}
    reserved = bob.reserve(space, bytes(16), KEYS)
    until(lambda: bool(store_filled(bob, space, KEYS, b"b")), "bob's memory was touched")
    assert reserved.granted == {}
    lease = bob.lookup(space, JOINED, lease=True).lease
    assert lease is not None
    taken = {ref.segment for ref in lease.refs}
    for number in taken:
        whole = bytes(bob.segments(bob.epoch).segment(number))
        assert b"s" * 64 not in whole, "bytes of another tenant"
        assert b"b" * 64 not in bytes(old[number]), "the old mapping shows the new tenant's bytes"
        until(partial(nothing_in, old[number]), "the old memory is freed")
        old[number][:PAGE] = b"e" * PAGE
        assert b"e" * 64 not in bytes(bob.segments(bob.epoch).segment(number))
        with pytest.raises(StaleReference):
            ann.attach(number, ann.epoch)


@own_node
def test_a_segment_that_comes_back_is_mapped_anew(place: TenantNode, connect: Connect, space: Namespace) -> None:
    """Whoever kept an old mapping must not store into it: nobody would find the bytes."""
    ann, bob = connect(ANN), connect(BOB)
    store_filled(ann, space, chain("first", 300), b"a")
    before = ann.segments(ann.epoch)
    old = {number: before.segment(number) for number in range(4)}
    place.change(tenancy.set_quota(place.registry, "ann", Quota(cap="50%")))
    until(lambda: bool(store_filled(bob, space, chain("bob", 300), b"b")), "bob has memory")
    place.change(tenancy.remove_tenant(tenancy.set_quota(place.registry, "ann", Quota()), "bob"))
    until(lambda: store_filled(ann, space, [*chain("last", 300)], b"z") > 0, "ann has memory")
    place.node.wait_touched()
    store_filled(ann, space, chain("very last", 200), b"y")
    assert ann.segments(ann.epoch) is before
    assert set(first_bytes(connect(ANN), space, chain("very last", 200))) <= {b"y"}
    assert len(first_bytes(connect(ANN), space, chain("very last", 200))) > 0
    assert any(not any(mapped) for mapped in old.values())


@own_node
def test_the_quota_holds_over_the_wire(place: TenantNode, connect: Connect, space: Namespace) -> None:
    place.change(tenancy.set_quota(place.registry, "ann", Quota(cap="25%")))
    ann = connect(ANN)
    store_filled(ann, space, chain("x", 300), b"a")
    (row,) = ann.stats()["namespaces"]  # type: ignore[misc]
    assert row["capacity"] * PAGE <= 256 << 10  # type: ignore[has-type]
    place.change(tenancy.set_quota(place.registry, "bob", Quota(cap="10%")))
    with pytest.raises(PoolRefused, match="less than a segment"):
        store_filled(connect(BOB), space, KEYS, b"b")


def test_an_impostor_that_knows_no_key_is_found_out(tmp_path: Path) -> None:
    """A process in the node's place can ask for a proof, but gives none itself."""
    import threading

    path = tmp_path / "s"

    def pretend(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(coding.encode(messages.Challenge(bytes(16), bytes(16), 4096, 0)))
            peer.recv(4096)
            peer.sendall(coding.encode(messages.Welcome(1, "x", "1", False, 0)))
            peer.recv(4096)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        client = PoolClient(path, credentials=ANN)
        with pytest.raises(Unauthorised, match="it may be an impostor"):
            client.connect()
        client.close()
        thread.join()


def test_credentials_show_no_key() -> None:
    assert "ems_key" not in repr(ANN)
    assert "ems_key" not in f"{ANN}"
