"""What a tenant does to the node and to others with the memory that it was given: real nodes, real files.

Each test does the worst that comes to mind with the descriptor of a segment, and then looks whether another tenant is
served as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ems.errors import EmsError
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.layout import (
    HEADERS_OFFSET,
    Description,
    SlotState,
    header_offset,
    pack_description,
    unpack_description,
    unpack_header,
)
from ems.pool.protocol import coding, messages
from ems.pool.protocol.acts import Resize
from ems.pool.reasons.words import Reason
from ems.pool.segments.recovery import MOST
from ems.pool.segments.touch import punch
from ems.pool.tenants.scram import Credentials
from tests.kit.headers import write_header
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.mounts import tmpfs
from tests.pool.stored_pages import first_bytes, store_filled
from tests.pool.tenants.people import ANN, BOB, registry_of, save

pytestmark = pytest.mark.process

PAGE = 16 << 10
SPACE = Namespace("default/model/layout", PAGE)
KEYS = chain("x", 3)
JOINED = b"".join(KEYS)
SEGMENT = 256 << 10
SIZE = ("--size", "1MB", "--segment-size", "256KB")
PATIENCE = 30.0

Connect = Callable[[Credentials], PoolClient]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "tenants.json", registry_of(ANN, BOB))
    return tmp_path / "tenants.json"


@pytest.fixture
def flags() -> tuple[str, ...]:
    return SIZE


@pytest.fixture
def node(path: Path, flags: tuple[str, ...]) -> Iterator[NodeProcess]:
    with NodeProcess(*flags, "--tenants", str(path)) as running:
        running.wait_touched()
        yield running
        assert running.returncode is None, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture
def connect(node: NodeProcess) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def make(who: Credentials) -> PoolClient:
            client = node.client("test", who)
            stack.callback(client.close)
            return client

        yield make


def segment_of(client: PoolClient) -> int:
    """The segment of the client's pages."""
    hits = client.lookup(SPACE, JOINED, lease=True)
    assert hits.lease is not None
    (number,) = {ref.segment for ref in hits.lease.refs}
    client.release(hits.lease)
    return number


def taken(client: PoolClient, number: int) -> int:
    """The descriptor of a segment, as any process of the tenant can have it."""
    sock = client.connection.sock  # type: ignore[union-attr]
    sock.settimeout(PATIENCE)
    sock.sendall(coding.encode(messages.Attach(number)))
    _, (descriptor,), _, _ = socket.recv_fds(sock, 4096, 4)
    return descriptor


def memory_of_his_own(client: PoolClient) -> Callable[[], bool]:
    def stored() -> bool:
        store_filled(client, SPACE, KEYS, b"b")
        return first_bytes(client, SPACE, KEYS) == [b"b"] * 3

    return stored


@pytest.fixture
def bob(connect: Connect) -> PoolClient:
    """Who must not notice anything."""
    client = connect(BOB)
    until(memory_of_his_own(client), "bob is served", PATIENCE)
    return client


def fresh(node: NodeProcess, connect: Connect) -> None:
    """Ann's segment was set aside, and she can go on with another; her old mappings are not looked at."""
    until(lambda: "begins anew" in node.log, "the segment is set aside", PATIENCE)
    line = next(line for line in node.log.splitlines() if "begins anew" in line)
    assert "ann" in line
    assert "segment=" in line or "segment" in line
    again = connect(ANN)
    assert again.lookup(SPACE, JOINED).count == 0
    told = again.explain(SPACE.name, JOINED)
    assert told.codes[0] == Reason.CHECKSUM.code

    def stored() -> bool:
        return bool(store_filled(again, SPACE, KEYS, b"n")) and first_bytes(again, SPACE, KEYS) == [b"n"] * 3

    until(stored, "ann has memory again", PATIENCE)


# A file that is cut


def test_a_cut_file_costs_its_pages_and_nothing_else(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    os.ftruncate(taken(ann, segment_of(ann)), 0)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    fresh(node, connect)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    assert node.log.count("begins anew") == 1


def test_the_node_writes_headers_into_a_file_that_is_gone(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    descriptor = taken(ann, segment_of(ann))
    half = ann.reserve(SPACE, KEYS[-1], chain("half", 2))
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(EmsError):
        ann.commit(half)
    with contextlib.suppress(EmsError):
        ann.reserve(SPACE, bytes(16), chain("other", 4))
    hits = ann.lookup(SPACE, JOINED, lease=True)
    if hits.lease is not None:
        reader = ann.reader(SPACE, ann.epoch)
        reader.corrupt = list(zip(KEYS, hits.lease.refs, strict=True))
        ann.report(SPACE, reader)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    fresh(node, connect)
    with contextlib.suppress(EmsError):
        ann.commit(half)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3


def test_cutting_again_and_again_hurts_nobody(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    for turn in range(4):
        ann = connect(ANN)

        def stored(client: PoolClient = ann) -> bool:
            return bool(store_filled(client, SPACE, KEYS, b"a"))

        until(stored, "ann has memory again", PATIENCE)
        descriptor = taken(ann, segment_of(ann))
        for size in (0, SEGMENT, HEADERS_OFFSET, 100, SEGMENT - 1):
            os.ftruncate(descriptor, size)
        until(lambda turn=turn: node.log.count("begins anew") > turn, "it is noticed", PATIENCE)  # type: ignore[misc]
        os.close(descriptor)
        assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    assert node.figures()["slots_resting"] == 0


def test_a_cut_file_is_upgraded(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    os.ftruncate(taken(ann, segment_of(ann)), 0)
    node.upgrade()
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    again = connect(ANN)
    assert again.lookup(SPACE, JOINED).count == 0
    until(lambda: store_filled(again, SPACE, KEYS, b"n"), "ann has memory again", PATIENCE)
    assert first_bytes(again, SPACE, KEYS) == [b"n"] * 3
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3


@pytest.mark.parametrize("size", [0, 100, HEADERS_OFFSET, HEADERS_OFFSET + 100, 2 * SEGMENT])
def test_a_file_that_is_cut_while_no_node_runs_costs_its_pages_only(
    node: NodeProcess, connect: Connect, bob: PoolClient, size: int
) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    mine = segment_of(bob)
    others = [number for number in range(4) if number != mine]
    descriptors = [taken(ann, segment_of(ann))]
    node.kill()
    os.ftruncate(descriptors[0], size)
    # And all that ann could have: most segments have another size than the node made.
    for number in others:
        os.truncate(node.directory / f"segment-{number:05d}", size)
    node.start()
    node.wait_touched()
    assert first_bytes(connect(BOB), SPACE, KEYS) == [b"b"] * 3
    assert "files of another size" in node.log
    assert node.figures()["segments"] == 4
    assert first_bytes(connect(ANN), SPACE, KEYS) == []


def test_a_cut_segment_that_is_given_up_comes_back_whole(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    descriptor = taken(ann, segment_of(ann))
    with contextlib.closing(PoolClient(node.socket, "test", administers=True)) as administrator:
        os.ftruncate(descriptor, 0)
        administrator.administer(Resize(2 * SEGMENT))
        os.ftruncate(descriptor, 100)
        until(lambda: node.figures()["bytes_total"] == 2 * SEGMENT, "the pool is smaller", PATIENCE)
        os.ftruncate(descriptor, 0)
        administrator.administer(Resize(4 * SEGMENT))
        until(lambda: node.figures()["bytes_total"] == 4 * SEGMENT, "the pool is as large as before", PATIENCE)
    node.wait_touched()
    assert bob.lookup(SPACE, JOINED).count in (0, 3)
    until(memory_of_his_own(connect(BOB)), "bob is served", PATIENCE)


# Tiers


@pytest.mark.parametrize("write", ["on_save", "on_evict"])
def test_a_tier_works_on_while_a_tenant_cuts_what_it_is_to_write(path: Path, tmp_path: Path, write: str) -> None:
    keys = [chain(f"long {number}", 40) for number in range(6)]
    with NodeProcess(
        *("--size", "4MB", "--segment-size", "1MB", "--tenants", str(path)),
        *("--tier", f"dir:{tmp_path}/tier?write={write}"),
    ) as node:
        node.wait_touched()
        bob = node.client("test", BOB)
        until(memory_of_his_own(bob), "bob is served", PATIENCE)
        for one in keys:
            ann = node.client("test", ANN)
            with contextlib.suppress(EmsError):
                reserved = ann.reserve(SPACE, bytes(16), one)
                numbers = {ref.segment for ref in reserved.granted.values()}
                ann.commit(reserved)
                for number in numbers:
                    descriptor = taken(ann, number)
                    os.ftruncate(descriptor, 0)
                    os.close(descriptor)
            ann.close()
            assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
        until(
            lambda: (
                store_filled(bob, SPACE, chain("later", 3), b"c")
                + first_bytes(bob, SPACE, chain("later", 3)).count(b"c")
            ),
            "bob stores on",
        )
        figures = node.figures()["tiers"][0]
        assert figures["write_failures"] == 0
        assert "Traceback" not in node.log, node.log
        assert node.returncode is None
        bob.close()


def test_pages_of_a_tier_come_back_beside_a_file_that_is_cut(path: Path, tmp_path: Path) -> None:
    keys = chain("long", 40)
    with NodeProcess(
        *("--size", "4MB", "--segment-size", "1MB", "--tenants", str(path)), "--tier", f"dir:{tmp_path}/tier"
    ) as node:
        node.wait_touched()
        for who, payload in ((ANN, b"a"), (BOB, b"b")):
            client = node.client("test", who)
            assert store_filled(client, SPACE, keys, payload) == 40
            client.close()
        until(lambda: node.figures()["tiers"][0]["pages_written"] == 80, "all was written", PATIENCE)
        node.stop()
        for left in node.directory.iterdir():
            left.unlink()
        node.start()
        node.wait_touched()
        ann, bob = node.client("test", ANN), node.client("test", BOB)
        reader = Namespace(SPACE.name, 0)
        until(lambda: bob.lookup(reader, b"".join(keys)).below > 0, "the tier is known", PATIENCE)
        assert ann.prefetch(reader, b"".join(keys)) == 40
        mine: set[int] = set()

        def cut() -> bool:
            hits = ann.lookup(SPACE, b"".join(keys), lease=True)
            if hits.lease is not None:
                mine.update(ref.segment for ref in hits.lease.refs)
                ann.release(hits.lease)
            for number in mine:
                with contextlib.suppress(EmsError, OSError, ValueError):
                    descriptor = taken(ann, number)
                    os.ftruncate(descriptor, 0)
                    os.close(descriptor)
            return bool(mine)

        until(cut, "ann cut something", PATIENCE)
        until(lambda: bob.lookup(SPACE, b"".join(keys)).count == 40, "bob's pages came up", PATIENCE)
        assert first_bytes(bob, SPACE, keys) == [b"b"] * 40
        assert node.returncode is None
        assert "Traceback" not in node.log, node.log
        ann.close()
        bob.close()


# Other things that can be done to a descriptor


def test_a_file_that_is_made_longer_is_cut_back_and_keeps_its_pages(
    node: NodeProcess, connect: Connect, bob: PoolClient
) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    number = segment_of(ann)
    descriptor = taken(ann, number)
    for _ in range(3):
        os.posix_fallocate(descriptor, 0, 16 << 20)
        until(lambda: os.fstat(descriptor).st_size == SEGMENT, "it is cut back", PATIENCE)
    assert first_bytes(ann, SPACE, KEYS) == [b"a"] * 3
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
    assert node.log.count("made a segment's file longer") == 1


def test_flags_of_a_descriptor_do_not_change_what_the_node_writes(
    node: NodeProcess, connect: Connect, bob: PoolClient
) -> None:
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    descriptor = taken(ann, segment_of(ann))
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.lseek(descriptor, 12345, os.SEEK_SET)
    store_filled(ann, SPACE, chain("more", 3), b"a")
    assert first_bytes(ann, SPACE, chain("more", 3)) == [b"a"] * 3
    assert os.fstat(descriptor).st_size == SEGMENT
    assert "longer" not in node.log
    fcntl.fcntl(taken(ann, segment_of(ann)), fcntl.F_GETFL)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3


def test_descriptors_that_nobody_takes_do_not_use_up_the_systems(path: Path) -> None:
    """The kernel bounds how many are on their way, for all connections of the node together."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with NodeProcess(*SIZE, "--tenants", str(path)) as node:
        node.wait_touched()
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (128, hard))
        ann, bob = node.client("test", ANN), node.client("test", BOB)
        until(memory_of_his_own(bob), "bob is served", PATIENCE)
        store_filled(ann, SPACE, KEYS, b"a")
        number = segment_of(ann)
        greedy = [node.client("test", ANN) for _ in range(8)]
        for client in greedy:
            client.lookup(SPACE, JOINED)
            sock = client.connection.sock  # type: ignore[union-attr]
            with contextlib.suppress(OSError):
                for _ in range(100):
                    sock.sendall(coding.encode(messages.Attach(number)))
        again = node.client("test", BOB)
        until(lambda: first_bytes(again, SPACE, KEYS) == [b"b"] * 3, "bob maps his segments", PATIENCE)
        assert "were asked for and none was taken" in node.log
        for client in (*greedy, ann, bob, again):
            client.close()


def forge_stamps(client: PoolClient, number: int, stamp: int, carving: int | None = None) -> None:
    segment = client.segments(client.epoch).segment(number)
    told = unpack_description(bytes(segment[:HEADERS_OFFSET]), len(segment))
    assert isinstance(told, Description)
    for slot in range(told.geometry.slot_count):
        header = unpack_header(segment, header_offset(slot))
        if header.state == SlotState.PRESENT:
            write_header(segment, slot, header._replace(stamp=stamp, generation=0xFFFFFFFF, parent=header.key))
    if carving is not None:
        fields = {name: getattr(told, name) for name in told.__struct_fields__}
        segment[:HEADERS_OFFSET] = pack_description(Description(**{**fields, "carving": carving}))


@pytest.mark.parametrize("carving", [None, MOST - 1])
def test_numbers_that_no_node_gave_cost_nobody_else_a_page(
    node: NodeProcess, connect: Connect, bob: PoolClient, carving: int | None
) -> None:
    """Nodes go on from the largest: after one that is as large as can be, all later ones were taken for damage."""
    ann = connect(ANN)
    store_filled(ann, SPACE, KEYS, b"a")
    forge_stamps(ann, segment_of(ann), MOST - 1, carving)
    for turn in range(3):
        node.kill()
        node.start()
        bob = connect(BOB)
        assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
        for before in range(turn):
            assert first_bytes(bob, SPACE, chain(f"turn {before}", 3)) == [b"c"] * 3

        def stored(client: PoolClient = bob, keys: list[bytes] = chain(f"turn {turn}", 3)) -> bool:  # noqa: B008
            return bool(store_filled(client, SPACE, keys, b"c"))

        until(stored, "bob stores on", PATIENCE)


def test_a_segment_for_very_many_pages_is_not_believed(node: NodeProcess, connect: Connect, bob: PoolClient) -> None:
    with pytest.raises(EmsError):
        connect(ANN).reserve(Namespace("default/tiny/layout", 0), bytes(16), KEYS)
    assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3


# Memory that is used up


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_memory_that_a_tenant_fills_and_punches_ends_nobody(path: Path) -> None:
    """A hole where a header was, and no memory to fill it: mapped, a write to it would end the node."""
    with (
        tempfile.TemporaryDirectory(prefix="ems-test-", dir="/dev/shm") as home,
        tmpfs(Path(home) / "memory", "size=8m") as memory,
        NodeProcess(*SIZE, "--tenants", str(path), parent=memory) as node,
    ):
        node.wait_touched()
        bob = node.client("test", BOB)
        until(memory_of_his_own(bob), "bob is served", PATIENCE)
        ann = node.client("test", ANN)
        store_filled(ann, SPACE, KEYS, b"a")
        descriptor = taken(ann, segment_of(ann))
        half = ann.reserve(SPACE, KEYS[-1], chain("half", 2))
        punch(descriptor, SEGMENT)
        with (memory / "balloon").open("wb") as balloon, contextlib.suppress(OSError):
            while True:
                os.write(balloon.fileno(), bytes(4096))
        with contextlib.suppress(EmsError):
            ann.commit(half)
        with contextlib.suppress(EmsError):
            ann.reserve(SPACE, bytes(16), chain("other", 2))
        assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
        store_filled(bob, SPACE, chain("more", 3), b"c")
        assert first_bytes(bob, SPACE, chain("more", 3)) == [b"c"] * 3
        until(lambda: "begins anew" in node.log, "the segment is set aside", PATIENCE)
        (memory / "balloon").unlink()
        os.close(descriptor)
        ann.close()
        again = node.client("test", ANN)
        until(
            lambda: store_filled(again, SPACE, KEYS, b"n") and first_bytes(again, SPACE, KEYS) == [b"n"] * 3,
            "ann has memory again",
            PATIENCE,
        )
        assert first_bytes(bob, SPACE, KEYS) == [b"b"] * 3
        assert "Traceback" not in node.log, node.log
        again.close()
        bob.close()
