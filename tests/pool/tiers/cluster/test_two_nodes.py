"""Two nodes and a real Mooncake master: what one saves the other serves, and nobody waits for a lost cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ems.pool.client.answers import Hits, LookupHints, Namespace
from ems.pool.keys import NO_DIRECTORY, NO_PARENT, Tail
from ems.pool.reasons.words import Reason
from ems.pool.tiers.cluster.objects import Objects
from ems.pool.tiers.pack_seal import read_keys
from tests.kit.mooncake import MooncakeMaster
from tests.kit.tiers import key, page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, start_master, write_settings
from tests.pool.tiers.pages import look, read, save, wait_for

pytestmark = pytest.mark.process
PAGE = 64 << 10
NAMESPACE = Namespace("tenant/model/layout", PAGE)
SIZE = ("--size", "16MB", "--segment-size", "4MB")


def chain(name: str, length: int) -> list[bytes]:
    return [key(f"{name}/{block}") for block in range(length)]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with start_master(tmp_path) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path, master: MooncakeMaster) -> str:
    return f"mooncake:{write_settings(tmp_path, master.endpoint)}?copy_ahead=never"


def test_what_one_host_saves_another_serves(settings: str, make_node: MakeNode, make_client: MakeClient) -> None:
    first, second = (make_node(*SIZE, "--tier", settings) for _ in range(2))
    for node in (first, second):
        node.wait_touched()
    writer, reader = make_client(first), make_client(second)
    keys = chain("a", 40)
    assert save(writer, NAMESPACE, keys) == len(keys)
    until(lambda: cluster(first)["pages_written"] >= len(keys), "all was written", 45)
    wait_for(reader, NAMESPACE, keys)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    assert cluster(second)["pages_fetched"] == len(keys)
    assert cluster(second)["fetch_corrupt"] == 0

    before = cluster(second)["tier_read_directly"]
    more = chain("b", 40)
    assert save(writer, NAMESPACE, more) == len(more)
    wait_for(reader, NAMESPACE, more)
    assert read(reader, NAMESPACE, more) == [page(one, PAGE) for one in more]
    assert cluster(second)["tier_read_directly"] - before == len(more), "the host was reached before"


def test_a_lookup_waits_for_the_master_where_it_may(
    settings: str, make_node: MakeNode, make_client: MakeClient
) -> None:
    node = make_node(*SIZE, "--tier", settings)
    node.wait_touched()
    client = make_client(node)
    client.open(NAMESPACE)
    patient = LookupHints(patience=1.0)
    until(lambda: client.lookup(NAMESPACE, key("first"), hints=patient).below == 0, "the cluster answers", 45)
    for block in range(10):
        absent = key(f"absent/{block}")
        assert client.lookup(NAMESPACE, absent).below == 1, "perhaps it comes up"
        assert client.lookup(NAMESPACE, absent, hints=patient).below == 0
        tail = Tail(absent, bytes(8))
        assert client.lookup_tail(NAMESPACE, tail).below
        assert not client.lookup_tail(NAMESPACE, tail, patience=1.0).below


def test_who_asks_for_keys_hears_of_tails_as_well(settings: str, make_node: MakeNode, make_client: MakeClient) -> None:
    node = make_node(*SIZE, "--tier", settings)
    node.wait_touched()
    client, numbers = make_client(node), count()
    client.open(NAMESPACE)

    def knows_both() -> bool:
        number, asked = next(numbers), cluster(node)["tier_asked"]
        directory = key(f"directory/{number}")
        hints = LookupHints(patience=1.0, directories=directory + NO_DIRECTORY)
        none = client.lookup(NAMESPACE, key(f"key/{number}"), hints=hints).below == 0
        both = none and not client.lookup_tail(NAMESPACE, Tail(directory, bytes(8))).below
        return both and cluster(node)["tier_asked"] == asked + 1

    until(knows_both, "one question is enough", 45)


@pytest.mark.parametrize("change", ["shorter", "longer", "another byte"])
def test_what_was_damaged_is_a_miss_and_gives_way_to_what_is_computed(
    change: str, settings: str, master: MooncakeMaster, tmp_path: Path, make_node: MakeNode, make_client: MakeClient
) -> None:
    secret = tmp_path / "cluster.key"
    secret.write_text("a secret of all nodes that share it")
    secret.chmod(0o600)
    first, second, third = (make_node(*SIZE, "--tier", f"{settings}&seal_key={secret}") for _ in range(3))
    for node in (first, second, third):
        node.wait_touched()
    keys = chain("a", 2)
    save(make_client(first), NAMESPACE, keys)
    until(lambda: cluster(first)["pages_written"] >= len(keys), "all was written", 45)
    seal = Objects(read_keys(secret, encrypts=False)).of(NAMESPACE.name)
    assert seal is not None
    overwrite(master, seal.name(keys[0]), change)

    reader = make_client(second)
    until(lambda: look(reader, NAMESPACE, keys[:1]).count or cluster(second)["fetch_corrupt"], "it was tried", 45)
    assert look(reader, NAMESPACE, keys[:1]).count == 0
    assert cluster(second)["tier_agent_starts"] <= 2
    assert save(reader, NAMESPACE, keys[:1]) == 1
    # By the first one, where that looked just then whether the cluster has what its memory has.
    until(lambda: sum(cluster(node)["pages_written"] for node in (first, second)) == 3, "it was written again", 45)
    wait_for(make_client(third), NAMESPACE, keys)
    assert read(make_client(third), NAMESPACE, keys) == [page(one, PAGE) for one in keys]


OVERWRITE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
good = store.get(sys.argv[2])
bad = {"shorter": good[:100], "longer": good + b"x", "another byte": good[:-1] + bytes([good[-1] ^ 1])}[sys.argv[3]]
assert not store.upsert(sys.argv[2], bad)
assert store.get(sys.argv[2]) == bad
import os
os._exit(0)
"""


def overwrite(master: MooncakeMaster, name: str, change: str) -> None:
    """As somebody does who has no secret; a process of its own, for Mooncake's client is one for each process."""
    command = [sys.executable, "-c", OVERWRITE, master.endpoint, name, change]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert not done.returncode, done.stderr[-1000:]


def test_who_keeps_to_this_host_neither_gives_nor_takes(
    settings: str, make_node: MakeNode, make_client: MakeClient
) -> None:
    first, second = (make_node(*SIZE, "--tier", f"{settings}&write={write}") for write in ("on_save", "on_evict"))
    for node in (first, second):
        node.wait_touched()
    kept, given, wished = chain("kept", 4), chain("given", 4), chain("wished", 4)
    save(make_client(first, cluster_write="never"), NAMESPACE, kept)
    save(make_client(first), NAMESPACE, given)
    save(make_client(second, cluster_write="on_save"), NAMESPACE, wished)
    for node in (first, second):
        until(lambda node=node: cluster(node)["pages_written"] == 4, "what was to be written was", 45)  # type: ignore[misc]
    alone = make_client(second, local_only=True)
    assert look(alone, NAMESPACE, given) == Hits(0, 0, None, Reason.LOCAL_ONLY, 0)
    assert alone.prefetch(NAMESPACE, b"".join(given)) == 0
    assert alone.explain(NAMESPACE.name, given[0]).codes == bytes([Reason.LOCAL_ONLY.code])
    assert cluster(second)["tier_asked"] == 0
    wait_for(make_client(second), NAMESPACE, given)
    assert read(alone, NAMESPACE, given) == [page(one, PAGE) for one in given], "somebody else had them fetched"
    wait_for(make_client(first), NAMESPACE, wished)
    until(lambda: look(make_client(second), NAMESPACE, kept).below == 0, "the cluster said that it has none", 45)
    assert cluster(second)["pages_fetched"] == 4


def test_part_of_a_chunk_is_found_on_another_host(settings: str, make_node: MakeNode, make_client: MakeClient) -> None:
    first, second = (make_node(*SIZE, "--tier", settings) for _ in range(2))
    for node in (first, second):
        node.wait_touched()
    writer, reader = make_client(first), make_client(second)
    tail = Tail(b"place" + bytes(11), b"".join(token.to_bytes(4, "little") for token in range(76)))
    name = bytes(tail.key)
    reservation = writer.reserve(NAMESPACE, NO_PARENT, [name], 5.0, [tail])
    writer.segments(reservation.epoch).page(reservation.granted[0], PAGE)[:] = page(name, PAGE)
    writer.commit(reservation)
    until(lambda: cluster(first)["pages_written"] >= 1, "it was written", 45)
    longer = Tail(tail.directory, tail.tokens + b"more" * 10)
    until(lambda: reader.lookup_tail(NAMESPACE, longer, lease=False, timeout=5.0).tokens == 76, "it came up", 45)
    assert read(reader, NAMESPACE, [name]) == [page(name, PAGE)]


def test_other_tenants_do_not_meet(settings: str, make_node: MakeNode, make_client: MakeClient) -> None:
    first, second = (make_node(*SIZE, "--tier", settings) for _ in range(2))
    for node in (first, second):
        node.wait_touched()
    keys = chain("a", 4)
    save(make_client(first), NAMESPACE, keys)
    until(lambda: cluster(first)["pages_written"] >= len(keys), "all was written", 45)
    reader, other = make_client(second), Namespace("other/model/layout", PAGE)
    wait_for(reader, NAMESPACE, keys)
    until(lambda: look(reader, other, keys).below == 0, "the cluster said that it has none", 45)
    assert look(reader, other, keys).count == 0


def test_a_lost_master_costs_the_cluster_and_nothing_else(
    settings: str, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    node = make_node(*SIZE, "--tier", settings)
    node.wait_touched()
    client = make_client(node)
    keys = chain("a", 8)
    save(client, NAMESPACE, keys)
    until(lambda: cluster(node)["pages_written"] >= len(keys), "all was written", 45)
    master.kill()

    def cut() -> bool:
        look(client, NAMESPACE, chain("b", 4))
        return not cluster(node)["reading"]

    until(cut, "the tier is left alone", 60)
    assert look(client, NAMESPACE, chain("c", 4)).below == 0
    assert read(client, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    assert "master" in cluster(node)["reason"]


def test_a_node_starts_without_a_master_and_says_so(tmp_path: Path, make_node: MakeNode) -> None:
    settings = write_settings(tmp_path, "127.0.0.1:9")
    node = make_node(*SIZE, "--tier", f"mooncake:{settings}")
    until(lambda: "no Mooncake master answers at 127.0.0.1:9" in node.log, "it says what is wrong", 45)
