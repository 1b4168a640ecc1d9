"""Whatever a client sends, the node lives and tells it why it was refused; other clients notice nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.errors import PoolRefused, ProtocolError, StaleReference
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol import coding, limits, messages
from ems.pool.protocol.messages import (
    Abort,
    Attach,
    Commit,
    Done,
    Figures,
    Granted,
    Hello,
    Hits,
    Lookup,
    Open,
    Opened,
    Refused,
    Release,
    Reserve,
    Stats,
)
from ems.pool.reasons.words import Reason
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import PAGE, MakeClient
from tests.pool.wire import wire


@pytest.fixture(autouse=True)
def bystander(node: NodeProcess, make_client: MakeClient, namespace: Namespace) -> Iterator[PoolClient]:
    """Another client, whose page must be there before and after."""
    client = make_client(node, "bystander")
    mine = Namespace(f"{namespace.name}/bystander", PAGE)
    client.commit(client.reserve(mine, bytes(16), chain("bystander", 1)))
    epoch = client.epoch
    yield client
    assert client.lookup(mine, b"".join(chain("bystander", 1))).count == 1
    assert client.epoch == epoch, "the bystander lost its connection"


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


GARBAGE = {
    "zeros": bytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "empty frame": frame(b""),
    "a number": frame(b"\x01"),
    "a map": frame(b"\x80"),
    "an unknown tag": frame(b"\x91\xa5Sesam"),
    "a huge list": frame(b"\x93\xa6Commit\x01\xdd\xff\xff\xff\xff"),
    "deep nesting": frame(b"\x91" * 3000),
    "not utf-8": frame(b"\x95\xa5Hello\x01\x01\xa2\xff\xfe\x01"),
    "random": frame(random.Random(7).randbytes(2000)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("greeted", [False, True], ids=["before the greeting", "after it"])
def test_garbage_ends_its_connection_with_a_reason(node: NodeProcess, garbage: bytes, greeted: bool) -> None:
    with wire(node.socket, greeted=greeted) as one:
        one.send(garbage)
        refused = one.refusal()
        assert refused.code == "protocol"
        assert refused.reason


def test_a_frame_too_large_is_refused_before_it_is_read(node: NodeProcess) -> None:
    with wire(node.socket) as one:
        one.send(struct.pack(">I", coding.MAX_FRAME + 1))
        assert "expected at most" in one.refusal().reason
    with wire(node.socket, greeted=False) as one:
        one.send(struct.pack(">I", coding.MAX_GREETING + 1))
        assert f"expected at most {coding.MAX_GREETING}" in one.refusal().reason


def test_another_protocol_version_is_refused_with_both_ranges(node: NodeProcess) -> None:
    with wire(node.socket, greeted=False) as one:
        one.send(Hello(7, 9, "from the future", 1))
        refused = one.refusal()
        assert refused.code == "version"
        assert "7 to 9" in refused.reason
        assert "1 to 3" in refused.reason


def test_a_greeting_with_fields_of_a_later_version_is_understood(node: NodeProcess) -> None:
    with wire(node.socket, greeted=False) as one:
        later = b"\x9a\xa5Hello\x01\x05\xa5later\x2a\xc2\xa0\xc4\x00\xc4\x00\x07"
        one.send(frame(later))
        assert isinstance(one.answer(), messages.Welcome)


@pytest.mark.parametrize("early", [Stats(), Open("a", 64), Attach(0), Lookup(0, bytes(16)), Release(1)], ids=repr)
def test_nothing_is_answered_before_the_greeting(node: NodeProcess, early: messages.Message) -> None:
    with wire(node.socket, greeted=False) as one:
        one.send(early)
        assert "before the greeting" in one.refusal().reason


def test_a_second_greeting_is_refused(node: NodeProcess) -> None:
    with wire(node.socket) as one:
        one.send(Hello(1, 1, "again", 1))
        assert "second Hello" in one.refusal().reason


@pytest.mark.parametrize("number", [-1, 99, 2**63])
def test_a_namespace_that_was_not_opened_is_refused_and_the_connection_goes_on(node: NodeProcess, number: int) -> None:
    with wire(node.socket) as one:
        for message in (Lookup(number, bytes(16)), Reserve(number, bytes(16), bytes(16))):
            refused = one.ask(message)
            assert isinstance(refused, Refused)
            assert refused.code == "stale"
            assert "is not open" in refused.reason
        assert isinstance(one.ask(Stats()), Figures)


def test_a_namespace_with_another_page_size_is_refused(client: PoolClient, namespace: Namespace) -> None:
    client.open(namespace)
    other = Namespace(namespace.name, PAGE * 2)
    with pytest.raises(PoolRefused, match="has pages of 4096 bytes, but 8192 were asked for"):
        client.open(other)
    with pytest.raises(PoolRefused, match="has pages of 4096 bytes"):
        client.lookup(other, bytes(16))
    assert client.lookup(namespace, bytes(16)).count == 0


@pytest.mark.parametrize("page_size", [-1, 1 << 40, 2**64 - 1])
def test_a_page_that_fits_nowhere_is_refused(node: NodeProcess, page_size: int) -> None:
    with wire(node.socket) as one:
        refused = one.ask(Open("too large", page_size))
        assert isinstance(refused, Refused)
        assert refused.code == "no-space"


def test_a_reader_that_knows_no_page_size_makes_no_namespace(node: NodeProcess) -> None:
    with wire(node.socket) as one:
        assert one.ask(Open("read only", 0)) == Opened(-1)
        made = one.ask(Open("read only", 4096))
        assert isinstance(made, Opened)
        assert one.ask(Open("read only", 0)) == made


@pytest.mark.parametrize("segment", [-1, 256, 2**63])
def test_a_segment_that_does_not_exist_is_refused(node: NodeProcess, segment: int) -> None:
    with wire(node.socket) as one:
        one.send(Attach(segment))
        assert "does not exist" in one.refusal().reason


def test_what_another_connection_holds_is_out_of_reach(node: NodeProcess, namespace: Namespace) -> None:
    with wire(node.socket) as holder, wire(node.socket) as thief:
        number = holder.open(namespace.name, PAGE)
        granted = holder.ask(Reserve(number, bytes(16), b"".join(chain("x", 2))))
        assert isinstance(granted, Granted)
        for message in (Commit(granted.reservation), Abort(granted.reservation), Commit(10**9), Abort(10**9)):
            refused = thief.ask(message)
            assert isinstance(refused, Refused)
            assert refused.code == "stale"
        assert holder.ask(Commit(granted.reservation)) == Done(2)
        leased = holder.ask(Lookup(number, b"".join(chain("x", 2)), lease=True))
        assert isinstance(leased, Hits)
        thief.send(Release(leased.lease))
        figures = thief.ask(Stats())
        assert isinstance(figures, Figures)
        assert figures.figures["leases"] == 1


def test_a_release_of_nothing_is_not_answered(node: NodeProcess) -> None:
    """An answer would be taken for that of the next request."""
    with wire(node.socket) as one:
        one.send(Release(10**9), Release(-1), Stats())
        assert isinstance(one.answer(), Figures)


def test_a_lease_released_twice_disturbs_nothing(client: PoolClient, namespace: Namespace) -> None:
    client.commit(client.reserve(namespace, bytes(16), chain("x", 3)))
    keys = b"".join(chain("x", 3))
    lease = client.lookup(namespace, keys, lease=True).lease
    assert lease is not None
    client.release(lease)
    client.release(lease)
    assert [client.lookup(namespace, keys[: 16 * count]).count for count in (1, 2, 3)] == [1, 2, 3]


def test_a_commit_of_pages_that_were_not_granted_publishes_nothing(client: PoolClient, namespace: Namespace) -> None:
    reserved = client.reserve(namespace, bytes(16), chain("x", 2))
    with pytest.raises(StaleReference, match="has no page 2"):
        client.commit(reserved, [0, 2])
    assert client.lookup(namespace, b"".join(chain("x", 2))).count == 0
    client.commit(reserved)
    assert client.lookup(namespace, b"".join(chain("x", 2))).count == 2


@pytest.mark.parametrize("raw", [b"", b"\x01", bytes(15), bytes(17)], ids=len)
def test_keys_that_are_cut_are_refused(node: NodeProcess, raw: bytes) -> None:
    with wire(node.socket) as one:
        number = one.open("cut", 64)
        one.send(Lookup(number, raw) if raw else Reserve(number, bytes(3), bytes(16)))
        assert "expected" in one.refusal().reason.lower()


def test_more_keys_than_any_prompt_has_are_refused(node: NodeProcess, client: PoolClient, namespace: Namespace) -> None:
    most = limits.MAX_KEYS
    with wire(node.socket) as one:
        number = one.open(namespace.name, PAGE)
        assert isinstance(one.ask(Lookup(number, bytes(16 * most))), Hits)
        one.send(Lookup(number, bytes(16 * (most + 1))))
        assert f"length <= {16 * most}" in one.refusal().reason
    with wire(node.socket) as one:
        number = one.open(namespace.name, PAGE)
        one.send(Commit(1, list(range(most + 1))))
        assert f"length <= {most}" in one.refusal().reason
    epoch = client.epoch
    with pytest.raises(ProtocolError, match=f"length <= {16 * most}"):
        client.lookup(namespace, bytes(16 * (most + 1)))
    assert client.lookup(namespace, bytes(16)).count == 0
    assert client.epoch in (epoch, 1), "a request that was never sent cost the connection"


def test_a_connection_cut_in_the_middle_of_a_frame_is_forgotten(node: NodeProcess, bystander: PoolClient) -> None:
    before = bystander.stats()["clients"]
    with wire(node.socket) as one:
        one.send(coding.encode(Stats())[:-1])
        until(lambda: bystander.stats()["clients"] == before + 1, "the node sees the client")  # type: ignore[operator]
    until(lambda: bystander.stats()["clients"] == before, "the node forgets the client")


def test_a_frame_in_single_bytes_is_understood(node: NodeProcess) -> None:
    with wire(node.socket, greeted=False) as one:
        for byte in coding.encode(Hello(1, 1, "slow", 1)):
            one.send(bytes([byte]))
        assert isinstance(one.answer(), messages.Welcome)


def test_requests_in_one_piece_are_answered_in_order(node: NodeProcess, namespace: Namespace) -> None:
    with wire(node.socket) as one:
        number = one.open(namespace.name, PAGE)
        keys = b"".join(chain("x", 3))
        one.send(Reserve(number, bytes(16), keys), Lookup(number, keys), Stats(), Lookup(number, keys[16:]))
        assert isinstance(one.answer(), Granted)
        assert one.answer() == Hits(0, 3, 0, b"", code=Reason.BEING_WRITTEN.code)
        assert isinstance(one.answer(), Figures)
        assert one.answer() == Hits(0, 2, 0, b"", code=Reason.BEING_WRITTEN.code)


def test_a_client_that_never_reads_is_cut_off(node: NodeProcess, bystander: PoolClient) -> None:
    before = bystander.stats()["connections_refused"]
    with wire(node.socket) as one:
        number = one.open("never read", PAGE)
        keys = chain("never read", 512)
        one.send(Reserve(number, bytes(16), b"".join(keys)))
        granted = one.answer()
        assert isinstance(granted, Granted)
        one.ask(Commit(granted.reservation))
        one.send(*[Lookup(number, b"".join(keys), lease=True)] * 20)
        figures = coding.encode(Stats()) * 100
        with contextlib.suppress(OSError):
            for _ in range(1000):
                one.send(figures)
        until(lambda: bystander.stats()["connections_refused"] == before + 1, "the node cuts it off")  # type: ignore[operator]
    until(lambda: bystander.stats()["leases"] == 0, "all that it held is taken back")
    assert "of answers unread" in node.log


def test_a_segment_asked_for_before_reading_answers_is_refused(node: NodeProcess) -> None:
    with wire(node.socket) as one:
        one.send(coding.encode(Stats()) * 300, Attach(0))
        reason = "a segment was asked for while earlier answers wait to be read"
        until(lambda: reason in node.log, "the node refuses")
        answers = 0
        while one.answer() is not None:
            answers += 1
        assert answers < 300


def test_a_flood_of_connections_leaves_room_for_the_next(node: NodeProcess, make_client: MakeClient) -> None:
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(100)]
    try:
        for one in crowd:
            one.settimeout(10.0)
            one.connect(str(node.socket))
        assert make_client(node).stats(timeout=5.0)["pid"] == node.pid
    finally:
        for one in crowd:
            one.close()


def test_a_client_that_hides_its_end_is_found_out(tmp_path: Path) -> None:
    """The wire of these tests reports a refusal only when the connection was closed, too."""
    path = tmp_path / "fake.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with wire(path, greeted=False) as one:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(coding.encode(Refused("protocol", "no")) + coding.encode(Done()))
                with pytest.raises(AssertionError, match="did not close"):
                    one.refusal()
    assert os.path.exists(path)  # noqa: PTH110 - only to say that nobody removed it
