"""Anything at all on the socket of a node, open or with tenants: it lives, answers or closes, and serves others."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.protocol import coding, limits, messages
from tests.kit.examples import examples
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import PAGE
from tests.pool.tenants.people import ANN, registry_of, save
from tests.pool.wire import Wire

RULES = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
KEPT = chain("kept", 1)
SPACE = Namespace("kept", PAGE)

numbers = st.one_of(st.integers(-1, 4), st.integers(-(2**63), 2**63 - 1))
keys = st.one_of(
    st.integers(0, 6).map(lambda count: b"".join(chain("x", count))),
    st.binary(max_size=40),
    st.just(bytes(KEY_BYTES * (limits.MAX_KEYS + 1))),
)
tails = st.none() | st.builds(Tail, st.binary(max_size=20), st.binary(max_size=20))
names = st.sampled_from(["kept", "n", "", "//ann/kept", "\0"]) | st.text(max_size=20)
MESSAGES = st.one_of(
    st.builds(
        messages.Hello, numbers, numbers, names, numbers, st.lists(names, max_size=2), names, st.binary(max_size=17)
    ),
    st.just(messages.Hello(1, 1, "good", os.getpid())),
    st.just(messages.Hello(1, 1, "asked", 1, False, "ann", bytes(16))),
    st.builds(messages.Prove, st.binary(min_size=30, max_size=33)),
    st.builds(messages.Open, names, st.sampled_from([0, -1, 64, PAGE, 2**40, 2**62])),
    st.builds(messages.Attach, numbers),
    st.builds(messages.Reserve, numbers, st.binary(min_size=15, max_size=16), keys, tails),
    st.builds(messages.Commit, numbers, st.none() | st.lists(numbers, max_size=3)),
    st.builds(messages.Abort, numbers),
    st.builds(messages.Lookup, numbers, keys, st.booleans(), tails),
    st.builds(messages.Release, numbers),
    st.just(messages.Stats()),
    st.builds(messages.Changes, numbers, st.lists(names, max_size=3)),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A frame of which some bytes are others, or missing."""
    frame = bytearray(coding.encode(draw(MESSAGES))[:200])
    for _ in range(draw(st.integers(0, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))])


PIECES = st.one_of(
    MESSAGES.map(coding.encode),
    MESSAGES.map(coding.encode),
    mutated(),
    st.binary(max_size=64),
    st.binary(max_size=64).map(coding.frame),
    st.sampled_from([0, 1, 4096, 4097, 1 << 22, (1 << 22) + 1, 2**31, 2**32 - 1]).map(
        lambda size: struct.pack(">I", size)
    ),
)


class Bystander:
    """A client with a page, who must not notice anything."""

    def __init__(self, node: NodeProcess, client: PoolClient) -> None:
        self.node = node
        self.client = client
        client.commit(client.reserve(SPACE, bytes(16), KEPT))
        self.epoch = client.epoch
        # Held: others may fill the pool, and a page that nobody holds may leave it then.
        self.lease = client.lookup(SPACE, KEPT[0], lease=True).lease
        assert self.lease is not None

    def is_well(self) -> None:
        assert self.client.lookup(SPACE, KEPT[0], timeout=60.0).count == 1
        assert self.client.epoch == self.epoch, "the bystander lost its connection"


@pytest.fixture(scope="module", params=["open", "tenants"])
def bystander(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bystander]:
    flags = ["--size", "4MB", "--segment-size", "64KB"]
    credentials = None
    if request.param == "tenants":
        path: Path = tmp_path_factory.mktemp("tenants") / "tenants.json"
        save(path, registry_of(ANN))
        flags += ["--tenants", str(path)]
        credentials = ANN
    with NodeProcess(*flags) as node:
        node.wait_touched()
        client = node.client("bystander", credentials)
        with contextlib.closing(client):
            bystander = Bystander(node, client)
            yield bystander
            if bystander.lease is not None:
                client.release(bystander.lease)
            until(lambda: node.figures()["leases"] == 0, "nobody holds anything")
            assert node.returncode is None, node.log
            assert "Traceback" not in node.log, node.log
            assert "defect" not in node.log, node.log


def drained(wire: Wire) -> None:
    """Read what the node has to say until it closes, or has nothing more to say."""
    with contextlib.suppress(TimeoutError):
        while wire.answer() is not None:
            pass


@RULES
@given(data=st.data())
def test_any_bytes_in_any_order(bystander: Bystander, data: st.DataObject) -> None:
    wire = Wire(bystander.node.socket)
    wire.sock.settimeout(0.01)
    try:
        if data.draw(st.booleans()):
            wire.send(messages.Hello(1, 1, "raw", os.getpid(), data.draw(st.booleans())))
        # Drawn before anything is sent: when the node closes is not hypothesis' to know.
        pieces = data.draw(st.lists(PIECES, max_size=8))
        cuts = [data.draw(st.integers(0, len(piece))) for piece in pieces]
        with contextlib.suppress(OSError):
            for piece, cut in zip(pieces, cuts, strict=True):
                wire.send(piece[:cut])
                wire.send(piece[cut:])
        drained(wire)
    finally:
        wire.sock.close()
    bystander.is_well()


@RULES
@given(sent=st.lists(MESSAGES, min_size=1, max_size=6))
def test_whoever_is_not_let_in_learns_nothing(bystander: Bystander, sent: list[messages.Message]) -> None:
    """On a node with tenants no answer but a challenge and a refusal ever comes without a proof."""
    wire = Wire(bystander.node.socket)
    wire.sock.settimeout(0.05)
    is_open = bool(bystander.node.figures()["tenants"]["open"])
    try:
        with contextlib.suppress(OSError, TimeoutError):
            wire.send(*sent)
            while (answer := wire.answer()) is not None:
                welcomed = isinstance(sent[0], messages.Hello) and (is_open or sent[0].administers)
                assert welcomed or isinstance(answer, messages.Challenge | messages.Refused), answer
    finally:
        wire.sock.close()
    bystander.is_well()
