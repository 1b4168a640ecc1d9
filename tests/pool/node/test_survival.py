"""Real nodes that are killed, stopped and started again: their pages are there, with the bytes that were stored."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import Tail
from ems.pool.layout import HEADERS_OFFSET, header_offset, slot_offset
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.pool.brain import chain
from tests.pool.conftest import PAGE, MakeClient, MakeNode
from tests.pool.stored_pages import NAMESPACE, back, content, load, store

FLAGS = ("--size", "4MB", "--segment-size", "512KB")


@pytest.fixture
def node(make_node: MakeNode) -> Iterator[NodeProcess]:
    running = make_node(*FLAGS)
    running.wait_touched()
    yield running
    assert "Traceback" not in running.log, running.log


@pytest.mark.process
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_all_pages_are_back(node: NodeProcess, make_client: MakeClient, how: str) -> None:
    client, keys = make_client(node), chain("x", 50)
    store(client, keys)
    tail = Tail(keys[-1], b"\1\0\0\0\2\0\0\0")
    store(client, [tail.key], keys[-1], tail)
    before = node.figures()
    node.kill() if how == "kill" else node.stop()
    node.start()
    back(node, client)
    figures = node.figures()
    assert figures["node"] != before["node"]
    assert figures["bytes_touched"] == figures["bytes_total"], "memory that is there was touched again"
    assert load(client, keys) == (50, 50)
    assert client.lookup_tail(NAMESPACE, Tail(keys[-1], b"\1\0\0\0\5\0\0\0")).tokens == 1
    assert store(client, keys) == 0, "they are taken for new"
    assert "pages are back" in node.log


@pytest.mark.process
def test_a_pool_grows_and_shrinks_with_its_pages(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS)
    node.wait_touched()
    client, keys = make_client(node), chain("x", 50)
    store(client, keys)
    node.stop()
    for size, segments in (("8MB", 16), ("1MB", 2)):
        node._flags = ("--size", size)
        node.start()
        back(node, client)
        assert node.figures()["segments"] == segments
        assert load(client, keys) == (50, 50)
        node.stop()


WRITER = """
import sys
from pathlib import Path
from ems.errors import PoolError
from ems.pool.client.pool_client import PoolClient
from tests.pool.brain import chain
from tests.pool.stored_pages import store

client = PoolClient(Path(sys.argv[1]), "writer")
print("ready", flush=True)
for number in range(10_000_000):
    keys = chain(f"{sys.argv[2]}/{number}", 8)
    try:
        if store(client, keys) == 8:
            print(number, flush=True)
    except PoolError:
        break
"""


@pytest.mark.process
def test_a_node_killed_under_writers_is_back_with_all_that_they_committed(
    make_node: MakeNode, make_client: MakeClient
) -> None:
    node = make_node("--size", "64MB", "--segment-size", "8MB")
    node.wait_touched()
    client = make_client(node)
    for round_ in range(3):
        names = [f"{round_}/{writer}" for writer in range(2)]
        command = [sys.executable, "-c", WRITER, str(node.socket)]
        writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in names]
        told: list[list[str]] = [[] for _ in writers]
        readers = [
            threading.Thread(target=lambda w=writer, t=lines: t.extend(w.stdout), daemon=True)
            for writer, lines in zip(writers, told, strict=True)
        ]
        for reader in readers:
            reader.start()
        until(lambda told=told: all(len(lines) > 20 for lines in told), "writers write", 60.0)  # type: ignore[misc]
        node.kill()
        for writer, reader in zip(writers, readers, strict=True):
            writer.wait(60)
            reader.join(60)
            assert writer.stdout is not None
            writer.stdout.close()
        node.start()
        back(node, client)
        for name, lines in zip(names, told, strict=True):
            for line in lines[1:]:
                assert load(client, chain(f"{name}/{line.strip()}", 8)) == (8, 8)
        figures = node.figures()
        assert figures["counters"]["pages_corrupt"] == 0


# Bytes that go bad


def hurt(node: NodeProcess, segment: int, at: int) -> None:
    """Flip a bit behind everybody's back."""
    with (node.directory / f"segment-{segment:05d}").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def place_of(client: PoolClient, key: bytes) -> tuple[int, int, int]:
    lease = client.lookup(NAMESPACE, key, lease=True).lease
    assert lease is not None
    client.release(lease)
    ref = lease.refs[0]
    segment = client.segments(client.epoch).segment(ref.segment)
    return ref.segment, ref.slot, slot_offset(len(segment), NAMESPACE.page_size, ref.slot)


@pytest.mark.process
def test_a_flipped_bit_is_a_miss_and_its_slot_is_not_used_again(make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*FLAGS, "--verify", "always")
    node.wait_touched()
    client, keys = make_client(node), chain("x", 4)
    store(client, keys)
    segment, slot, offset = place_of(client, keys[2])
    hurt(node, segment, offset + 77)
    assert load(client, keys) == (4, 2)
    assert load(client, keys) == (2, 2), "the node still offers it"
    figures = node.figures()
    assert (figures["counters"]["pages_corrupt"], figures["slots_quarantined"]) == (1, 1)
    assert "bytes of a page are wrong" in node.log
    assert store(client, keys) == 1
    assert place_of(client, keys[2])[:2] != (segment, slot)
    assert load(client, keys) == (4, 4)
    node.kill()
    node.start()
    back(node, client)
    assert load(client, keys) == (4, 4)


@pytest.mark.process
def test_pages_from_before_a_restart_are_always_checked(node: NodeProcess, make_client: MakeClient) -> None:
    client, keys = make_client(node), chain("x", 40)
    store(client, keys)
    segment, _, offset = place_of(client, keys[33])
    node.kill()
    hurt(node, segment, offset + 4000)
    node.start()
    back(node, client)
    assert load(client, keys) == (40, 33)


@pytest.mark.process
def test_a_page_whose_header_goes_bad_is_taken_out_when_it_is_noticed(
    node: NodeProcess, make_client: MakeClient
) -> None:
    client, keys = make_client(node), chain("x", 3)
    store(client, keys)
    segment, slot, _ = place_of(client, keys[1])
    hurt(node, segment, header_offset(slot) + 5)
    lease = client.lookup(NAMESPACE, b"".join(keys), lease=True).lease
    assert lease is not None
    reader = client.reader(NAMESPACE, lease.epoch)
    assert reader.look(lease.packed_refs, b"".join(keys)).present == 1
    assert client.report(NAMESPACE, reader) == 1
    client.release(lease)
    assert client.lookup(NAMESPACE, b"".join(keys)).count == 1
    assert store(client, keys) == 1
    assert load(client, keys) == (3, 3)


@pytest.mark.process
def test_a_false_report_changes_nothing(node: NodeProcess, make_client: MakeClient) -> None:
    client, keys = make_client(node), chain("x", 2)
    store(client, keys)
    lease = client.lookup(NAMESPACE, b"".join(keys), lease=True).lease
    assert lease is not None
    reader = client.reader(NAMESPACE, lease.epoch)
    reader.corrupt = [(keys[0], lease.refs[0]), (keys[1], lease.refs[1]._replace(generation=99))]
    assert client.report(NAMESPACE, reader) == 0
    assert load(client, keys) == (2, 2)
    assert node.figures()["counters"]["corrupt_unconfirmed"] == 1


@pytest.mark.process
def test_a_damaged_header_costs_its_page_only(node: NodeProcess, make_client: MakeClient) -> None:
    client, keys = make_client(node), chain("x", 5)
    store(client, keys)
    segment, slot, _ = place_of(client, keys[3])
    node.kill()
    hurt(node, segment, header_offset(slot) + 41)
    node.start()
    back(node, client)
    assert load(client, keys) == (3, 3)
    assert client.lookup(NAMESPACE, keys[4]).count == 1
    assert "lost=1" in node.log


@pytest.mark.process
def test_segments_that_cannot_be_read_begin_anew(node: NodeProcess, make_client: MakeClient) -> None:
    client, keys = make_client(node), chain("x", 3)
    store(client, keys)
    segment, _, _ = place_of(client, keys[0])
    node.kill()
    with (node.directory / f"segment-{segment:05d}").open("r+b") as file:
        file.seek(8)
        file.write(b"\1\0\0\0")
    node.start()
    back(node, client)
    assert load(client, keys) == (0, 0)
    assert "it has format 1, this release reads format 2" in node.log
    node.wait_touched()
    assert store(client, keys) == 3
    assert load(client, keys) == (3, 3)


# Readers of an earlier node


@pytest.mark.process
def test_who_maps_the_old_node_reads_right_bytes_or_nothing(node: NodeProcess, make_client: MakeClient) -> None:
    client, other, keys = make_client(node), make_client(node, "other"), chain("x", 3)
    store(client, keys)
    lease = client.lookup(NAMESPACE, b"".join(keys), lease=True).lease
    assert lease is not None
    reader = client.reader(NAMESPACE, lease.epoch)
    pages = reader.look(lease.packed_refs, b"".join(keys))
    assert pages.present == reader.sound(pages, 0, 3) == 3
    node.kill()
    assert bytes(reader.page(lease.refs[0])) == content(keys[0])
    node.start()
    back(node, other)
    assert reader.same(pages, 0, 3) == 3, "nothing happened to them"
    fill = [f"fill/{number}" for number in range(200)]
    for name in fill:
        store(other, chain(name, 10))
    assert [reader.same(pages, at, at + 1) for at in range(3)] == [0, 1, 2]
    ours = PoolClient(node.socket, "stranger")
    ours.connect()
    stranger = ours.reader(Namespace("test/other", PAGE), ours.epoch)
    (held,) = [lease for lease in [ours.lookup(NAMESPACE, chain(fill[-1], 1)[0], lease=True).lease] if lease]
    (key,) = chain(fill[-1], 1)
    assert ours.reader(NAMESPACE, ours.epoch).look(held.packed_refs, key).present == 1
    assert not stranger.look(held.packed_refs, key).present, "it is another namespace's"
    ours.close()


@pytest.mark.process
def test_stop_can_clear(node: NodeProcess, make_client: MakeClient) -> None:
    client = make_client(node)
    store(client, chain("x", 3))
    command = [sys.executable, "-m", "ems.cli", "stop", "--clear", "--socket", str(node.socket)]
    assert subprocess.run(command, check=False, env={**os.environ}).returncode == 0
    node.wait()
    assert not node.directory.exists()


@pytest.mark.process
def test_a_stop_keeps_the_files_private(node: NodeProcess, make_client: MakeClient) -> None:
    store(make_client(node), chain("x", 3))
    node.stop()
    left = {entry.name: entry.stat() for entry in node.directory.iterdir()}
    assert {status.st_mode & 0o777 for status in left.values()} == {0o600}
    segments = {f"segment-{number:05d}" for number in range(8)}
    assert segments <= set(left) <= segments | {"marks"}
    assert all(left[segment].st_size > HEADERS_OFFSET for segment in segments)
