"""Clients and nodes that die, hang and come back: nothing is held for the gone, and every call ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ems.errors import PoolNotTried, PoolRefused, PoolTimeout, PoolUnavailable, StaleReference
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.pages import Outcome
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import PAGE, MakeClient, MakeNode

pytestmark = pytest.mark.process

HOLDER = """
import sys
from pathlib import Path
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from tests.pool.brain import chain


client = PoolClient(Path(sys.argv[1]), "holder")
namespace = Namespace(sys.argv[2], 4096)
done = client.reserve(namespace, bytes(16), chain("done", 3))
client.commit(done)
client.lookup(namespace, b"".join(chain("done", 3)), lease=True)
half = client.reserve(namespace, bytes(16), chain("half", 5))
segments = client.segments(half.epoch)
for ref in half.granted.values():
    segments.page(ref, 4096)[:2048] = b"h" * 2048
print("holding", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(node: NodeProcess, namespace: Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a lease on three pages and five half-written ones."""
    command = [sys.executable, "-c", HOLDER, str(node.socket), namespace.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"holding\n"
            yield process
        finally:
            process.kill()


def kept(figures: dict[str, object]) -> tuple[object, object, object]:
    return figures["leases"], figures["reservations"], figures["slots_resting"]


# Clients


def test_a_killed_client_holds_nothing_at_once(node: NodeProcess, client: PoolClient, namespace: Namespace) -> None:
    with holder(node, namespace) as process:
        assert kept(client.stats()) == (1, 1, 0)
        assert client.lookup(namespace, b"".join(chain("half", 5))).pending == 5
        process.kill()
        until(lambda: kept(client.stats()) == (0, 0, 0), "all it held is released", 10.0)
    gone = client.lookup(namespace, b"".join(chain("half", 5)))
    assert (gone.count, gone.pending) == (0, 0)
    assert client.lookup(namespace, b"".join(chain("done", 3))).count == 3
    again = client.reserve(namespace, bytes(16), chain("half", 5))
    assert len(again.granted) == 5, "the slots of the dead are not free"


def test_the_slots_of_a_client_that_lives_rest(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node()
    client, leaving, namespace = make_client(node), node.client("leaving"), Namespace("a", PAGE)
    node.wait_touched()
    reserved = leaving.reserve(namespace, bytes(16), chain("x", 4))
    leaving.close()
    until(lambda: kept(client.stats()) == (0, 0, 4), "the node notices")
    assert client.lookup(namespace, b"".join(chain("x", 4))).pending == 0
    taken = {(ref.segment, ref.slot) for ref in client.reserve(namespace, bytes(16), chain("y", 40)).granted.values()}
    resting = {(ref.segment, ref.slot) for ref in reserved.granted.values()}
    assert len(resting) == 4
    assert not taken & resting


def test_nobody_reads_what_was_overwritten(make_node: MakeNode, make_client: MakeClient) -> None:
    """A page that lost its lease and its slot does not pass for itself any more."""
    node = make_node("--size", "1MB", "--segment-size", "256KB")
    client, reader, namespace = make_client(node), make_client(node, "reader"), Namespace("a", PAGE)
    node.wait_touched()
    client.commit(client.reserve(namespace, bytes(16), chain("old", 1)))
    lease = reader.lookup(namespace, chain("old", 1)[0], lease=True).lease
    assert lease is not None
    pages = reader.reader(namespace, lease.epoch)
    (ref,) = lease.refs
    assert pages.look(ref.pack(), chain("old", 1)[0]).present == 1
    assert pages.look(ref.pack(), chain("new", 1)[0]).present == 0
    assert pages.look(ref._replace(generation=ref.generation + 1).pack(), chain("old", 1)[0]).present == 0
    reader.release(lease)
    used, before = set(), bytes(16)
    for part in range(10):
        keys = chain(f"new {part}", 100)
        reserved = client.reserve(namespace, before, keys)
        client.commit(reserved)
        used |= {slot[:2] for slot in reserved.granted.values()}
        before = keys[-1]
    assert ref[:2] in used, "the slot was never used again"
    assert pages.look(ref.pack(), chain("old", 1)[0]).present == 0


# Full pools


def test_a_pool_full_of_leases_refuses_pages_and_no_call(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "1MB", "--segment-size", "256KB")
    client, namespace = make_client(node), Namespace("a", PAGE)
    node.wait_touched()
    keys = chain("x", 500)
    reserved = client.reserve(namespace, bytes(16), keys)
    client.commit(reserved)
    half = len(reserved.granted)
    assert 0 < half < 500
    assert set(reserved.outcomes[half:]) == {Outcome.OVER_SHARE}, "nobody holds more than half of a small pool"
    reserved = client.reserve(namespace, keys[half - 1], keys[half:])
    client.commit(reserved)
    fit = half + len(reserved.granted)
    assert half < fit < 500
    assert set(reserved.outcomes[fit - half :]) == {Outcome.NO_SPACE}
    lease = client.lookup(namespace, b"".join(keys), lease=True).lease
    assert lease is not None
    assert len(lease.refs) == fit
    refused = client.reserve(namespace, bytes(16), chain("y", 3))
    assert list(refused.outcomes) == [Outcome.NO_SPACE] * 3
    client.commit(refused)
    client.abort(refused)
    client.release(lease)
    assert len(client.reserve(namespace, bytes(16), chain("y", 3)).granted) == 3


def test_a_second_namespace_gets_segments_of_a_full_pool(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node("--size", "1MB", "--segment-size", "256KB")
    client, first, second = make_client(node), Namespace("first", PAGE), Namespace("second", 2 * PAGE)
    node.wait_touched()
    client.commit(client.reserve(first, bytes(16), chain("x", 500)))
    reserved = client.reserve(second, bytes(16), chain("y", 10))
    assert len(reserved.granted) == 10
    segments = client.segments(reserved.epoch)
    for position, ref in reserved.granted.items():
        segments.page(ref, second.page_size)[:] = bytes([position]) * second.page_size
    client.commit(reserved)
    shown = {row["name"]: row["pages"] for row in node.figures()["namespaces"]}
    assert shown["second"] == 10
    assert shown["first"] > 100, "the first namespace lost more than it had to"
    found = client.lookup(second, b"".join(chain("y", 10)), lease=True)
    assert found.lease is not None
    assert [segments.page(ref, second.page_size)[0] for ref in found.lease.refs] == list(range(10))


def test_a_page_larger_than_any_segment_is_refused_in_one_sentence(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    client = make_client(make_node("--size", "1MB", "--segment-size", "256KB"))
    with pytest.raises(PoolRefused, match="a page of 1048576 bytes does not fit in a segment of 262144 bytes"):
        client.open(Namespace("large", 1 << 20))
    client.open(Namespace("small", PAGE))


# Nodes


def test_a_killed_node_is_missed_at_once_and_found_again(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node()
    node.wait_touched()
    client, namespace = make_client(node), Namespace("a", PAGE)
    reserved = client.reserve(namespace, bytes(16), chain("x", 2))
    keys = b"".join(chain("x", 2))
    client.commit(reserved)
    lease = client.lookup(namespace, keys, lease=True).lease
    assert lease is not None
    half = client.reserve(namespace, bytes(16), chain("y", 2))
    node.kill()
    for _ in range(3):
        with pytest.raises(PoolUnavailable):
            client.lookup(namespace, keys)
    client.release(lease)
    node.start()
    node.wait_touched()
    until(lambda: reaches(client, namespace), "the client finds the new node")
    assert client.lookup(namespace, keys).count == 2, "pages were lost with their node"
    assert client.lookup(namespace, b"".join(chain("y", 2))).pending == 0
    for stale in (lambda: client.commit(half), lambda: client.abort(half), lambda: client.segments(half.epoch)):
        with pytest.raises(StaleReference):
            stale()
    client.release(lease)
    client.commit(client.reserve(namespace, bytes(16), chain("y", 2)))
    assert client.lookup(namespace, b"".join(chain("y", 2))).count == 2


def reaches(client: PoolClient, namespace: Namespace) -> bool:
    try:
        client.open(namespace)
    except PoolUnavailable:
        return False
    return True


def test_memory_of_a_dead_node_can_still_be_read_and_written(make_node: MakeNode, make_client: MakeClient) -> None:
    """An engine in the middle of a copy must not fall with the node."""
    node = make_node()
    node.wait_touched()
    client, namespace = make_client(node), Namespace("a", PAGE)
    reserved = client.reserve(namespace, bytes(16), chain("x", 1))
    page = client.segments(reserved.epoch).page(reserved.granted[0], PAGE)
    node.kill()
    node.start()
    page[:] = b"z" * PAGE
    assert page[-1] == ord("z")


def is_left_alone(client: PoolClient, namespace: Namespace) -> bool:
    """Whether a call fails without the node being asked."""
    with pytest.raises((PoolTimeout, PoolUnavailable)) as failed:
        client.lookup(namespace, bytes(16), timeout=0.2)
    return failed.type is PoolNotTried


def test_every_call_to_a_frozen_node_ends_at_its_deadline(
    make_node: MakeNode, make_client: MakeClient, calls_take_a_minute: float
) -> None:
    node = make_node()
    client, namespace = make_client(node), Namespace("a", PAGE)
    client.open(namespace)
    late = make_client(node, "late")
    node.send(signal.SIGSTOP)
    for call in (lambda: client.lookup(namespace, bytes(16), timeout=0.2), lambda: late.connect(timeout=0.2)):
        begin = time.monotonic()
        with pytest.raises(PoolTimeout):
            call()
        assert time.monotonic() - begin < calls_take_a_minute, "it waited as long as a call does that names no time"
    until(lambda: is_left_alone(client, namespace), "the client asks the node no more for a while")
    node.send(signal.SIGCONT)
    until(lambda: reaches(client, namespace), "the client finds the node again")
    assert client.lookup(namespace, bytes(16)).count == 0


def test_a_call_waits_for_another_no_longer_than_its_own_deadline(
    make_node: MakeNode, make_client: MakeClient, calls_take_a_minute: float
) -> None:
    node = make_node()
    client, namespace = make_client(node), Namespace("a", PAGE)
    client.open(namespace)
    node.send(signal.SIGSTOP)
    slow = threading.Thread(target=client.lookup, args=(namespace, bytes(16)), kwargs={"timeout": 60.0})
    slow.start()
    until(lambda: is_busy(client), "the first call waits for its answer")
    begin = time.monotonic()
    with pytest.raises(PoolTimeout, match="another call kept the connection"):
        client.lookup(namespace, bytes(16), timeout=0.1)
    assert time.monotonic() - begin < calls_take_a_minute, "it waited as long as a call does that names no time"
    node.send(signal.SIGCONT)
    slow.join(60.0)
    assert client.lookup(namespace, bytes(16)).count == 0


def is_busy(client: PoolClient) -> bool:
    """Whether another thread is in the middle of a call."""
    if not client._lock.acquire(blocking=False):
        return True
    client._lock.release()
    return False
