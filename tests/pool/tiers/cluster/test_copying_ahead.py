"""What is hot on one host is in the memory of the others before they are asked: nodes with a real Mooncake master."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ems.cli.acts import ask
from ems.pool.client.answers import Namespace
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.movement.hot_list import TOLD_ROUNDS, HotRun
from ems.pool.protocol.acts import Clear
from ems.pool.tiers.cluster.agent import NO_SECRET
from ems.pool.tiers.cluster.objects import Objects
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.tiers import page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, start_master, write_settings
from tests.pool.tiers.cluster.test_two_nodes import NAMESPACE, PAGE, chain
from tests.pool.tiers.pages import look, read, save

pytestmark = pytest.mark.process
SIZE = ("--size", "32MB", "--segment-size", "4MB")
OTHER = Namespace("tenant/other/layout", PAGE)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with start_master(tmp_path) as running:
        yield running


def start(make_node: MakeNode, tmp_path: Path, master: MooncakeMaster, *settings: str) -> list[NodeProcess]:
    tier = f"mooncake:{write_settings(tmp_path, master.endpoint)}"
    nodes = [make_node(*SIZE, "--tier", f"{tier}?{one}") for one in settings]
    for node in nodes:
        node.wait_touched()
    return nodes


@pytest.mark.parametrize("write", ["on_save", "on_second_use"])
def test_what_one_host_uses_again_another_has_in_memory(
    write: str, tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    first, second = start(make_node, tmp_path, master, *[f"write={write}"] * 2)
    writer, reader = make_client(first), make_client(second, local_only=True)
    keys, cold = chain("hot", 40), chain("cold", 4)
    for pages in (keys, cold):
        save(writer, NAMESPACE, pages)
    tail = Tail(keys[-1], b"8 bytes.")
    name = bytes(tail.key)
    reservation = writer.reserve(NAMESPACE, keys[-1], [name], 5.0, [tail])
    writer.segments(reservation.epoch).page(reservation.granted[0], PAGE)[:] = page(name, PAGE)
    writer.commit(reservation)
    assert look(reader, NAMESPACE, keys).count == 0, "this opens the namespace, and asks nobody for anything"

    assert read(writer, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    found = writer.lookup_tail(NAMESPACE, tail, lease=True)
    assert found.tokens == 2
    until(lambda: look(reader, NAMESPACE, [*keys, name]).count == len(keys) + 1, "the other host has them", 45)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    assert look(reader, NAMESPACE, cold).count == 0
    figures = cluster(second)
    assert figures["pages_fetched"] == figures["copied_ahead"] == len(keys) + 1
    assert figures["copied_ahead_used"] == len(keys)


def test_what_one_host_saves_another_has_in_memory(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    first, second, alone, without = start(
        make_node,
        tmp_path,
        master,
        *["copy_ahead=on_save"] * 2,
        "copy_ahead=on_save&local_only=true",
        "copy_ahead=never",
    )
    readers = [make_client(node, local_only=True) for node in (second, alone, without)]
    keys, others = chain("a", 8), chain("b", 8)
    for reader in readers:
        assert look(reader, NAMESPACE, keys).count == 0
    save(make_client(first), NAMESPACE, keys)
    save(make_client(alone), NAMESPACE, others)
    for pages in (keys, others):
        until(lambda pages=pages: look(readers[0], NAMESPACE, pages).count == 8, "the other host has them", 45)  # type: ignore[misc]
    until(lambda: look(make_client(first, local_only=True), NAMESPACE, others).count == 8, "the first one, too", 45)
    assert read(readers[0], NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    assert [cluster(node)["pages_fetched"] for node in (first, second, alone, without)] == [8, 16, 0, 0]
    assert look(readers[1], NAMESPACE, keys).count == look(readers[2], NAMESPACE, keys).count == 0


def test_what_was_only_copied_is_not_told_when_it_is_offered_again(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    """As after a master that was started again: no engine of that host has anything to do with it."""
    first, second, third = start(make_node, tmp_path, master, *["copy_ahead=on_save"] * 3)
    copier, other = (make_client(node, local_only=True) for node in (second, third))
    copied, saved = chain("a", 8), chain("b", 2)
    assert look(copier, NAMESPACE, copied).count == 0, "this opens the namespace"
    save(make_client(first), NAMESPACE, copied)
    until(lambda: look(copier, NAMESPACE, copied).count == len(copied), "the second host has them", 45)
    first.stop()
    master.kill()
    master.start()
    asker = make_client(second)

    def offered() -> bool:
        look(asker, NAMESPACE, chain("missing", 1))  # who misses something looks at once what is left of the cluster
        return bool(cluster(second)["pages_written"] == len(copied))

    until(offered, "it has offered them again", 45)
    assert look(other, NAMESPACE, saved).count == 0, "this opens the namespace"
    save(asker, NAMESPACE, saved)
    until(lambda: look(other, NAMESPACE, saved).count == len(saved), "the third host has what was saved", 45)
    assert cluster(third)["copied_ahead"] == len(saved), "and nothing else"


def test_the_list_of_what_was_cleared_is_not_written_again(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    """What a host tells it tells in several rounds: those behind the clearing would list what is gone."""
    (node,) = start(make_node, tmp_path, master, "copy_ahead=on_second_use")
    client, keys = make_client(node), chain("hot", 4)
    for namespace in (NAMESPACE, OTHER):
        save(client, namespace, keys)
    until(lambda: cluster(node)["pages_written"] == 2 * len(keys), "all was written", 45)
    read(client, NAMESPACE, keys)
    until(lambda: cluster(node)["hot_runs_told"], "it was told once", 45)
    report = ask(node.socket, Clear(namespace=NAMESPACE.name))
    assert report["tiers"][0]["reason"] == ""
    told = cluster(node)["hot_runs_told"]
    read(client, OTHER, keys)
    until(lambda: cluster(node)["hot_runs_told"] >= told + TOLD_ROUNDS, "all rounds are over", 45)
    objects = Objects(SealKeys(NO_SECRET, encrypts=False))
    sealed = [objects.of(namespace.name) for namespace in (NAMESPACE, OTHER)]
    assert there(master, [seal.hot_name for seal in sealed if seal is not None]) == [False, True]


ARE_THERE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
print(*store.batch_is_exist(sys.argv[2:]), flush=True)
os._exit(0)
"""


def there(master: MooncakeMaster, names: Sequence[str]) -> list[bool]:
    """Whether the cluster has objects of these names."""
    command = [sys.executable, "-c", ARE_THERE, master.endpoint, *names]
    done = subprocess.run(command, capture_output=True, check=True, timeout=100)
    return [one == b"1" for one in done.stdout.split()]


FORGE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
assert not store.upsert(sys.argv[2], sys.stdin.buffer.read())
os._exit(0)
"""


@pytest.mark.parametrize("what", ["random bytes", "pages that nobody stored", "pages of another size"])
def test_a_forged_list_costs_nothing(
    what: str, tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    """Without a secret anybody may write it."""
    first, second = start(make_node, tmp_path, master, *["copy_ahead=on_second_use"] * 2)
    writer, reader = make_client(first), make_client(second, local_only=True)
    look(reader, NAMESPACE, chain("none", 1))
    keys = chain("hot", 10)
    save(writer, NAMESPACE, keys)
    until(lambda: cluster(first)["pages_written"] == len(keys), "all was written", 45)
    seal = Objects(SealKeys(NO_SECRET, encrypts=False)).of(NAMESPACE.name)
    assert seal is not None
    listed = seal.hot_list([HotRun(NO_PARENT, b"".join(chain(name, 10))) for name in ("x", "y")])
    if what == "random bytes":
        listed = os.urandom(len(listed))
    if what == "pages of another size":
        pages = {seal.name(one): b"short" for one in chain("x", 10)}
        for name, content in pages.items():
            forge(master, name, content)
    forge(master, seal.hot_name, listed)
    read(writer, NAMESPACE, keys)
    until(lambda: look(reader, NAMESPACE, keys).count == len(keys), "what was told in earnest is there", 45)
    figures = cluster(second)
    assert figures["pages_fetched"] == len(keys)
    assert figures["cuts"] == 0
    assert look(reader, NAMESPACE, chain("x", 1)).count == 0


def forge(master: MooncakeMaster, name: str, content: bytes) -> None:
    """As somebody does; a process of its own, for Mooncake's client is one for each process."""
    command = [sys.executable, "-c", FORGE, master.endpoint, name]
    done = subprocess.run(command, input=content, capture_output=True, check=False, timeout=100)
    assert not done.returncode, done.stderr[-1000:]


def test_it_goes_on_behind_a_master_that_was_started_again(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    first, second = start(make_node, tmp_path, master, *["copy_ahead=on_second_use"] * 2)
    writer, reader = make_client(first), make_client(second, local_only=True)
    look(reader, NAMESPACE, chain("none", 1))
    master.kill()
    until(lambda: not cluster(second)["reading"], "the tier is left alone", 60)
    master.start()
    master.wait_ready()
    told: list[list[bytes]] = []

    def copied() -> bool:
        told.append(chain(f"hot-{len(told)}", 4))
        save(writer, NAMESPACE, told[-1])
        read(writer, NAMESPACE, told[-1])
        return any(look(reader, NAMESPACE, keys).count == len(keys) for keys in told)

    until(copied, "what is hot is copied again", 120)
