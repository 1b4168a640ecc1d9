"""Hosts that leave, lose what they lent, or lose their master for a while: what is hot is in the cluster again."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ems.cli.status import summary_rows
from ems.errors import EmsError
from ems.pool.administration.figures import judge
from ems.pool.client.answers import Namespace
from ems.pool.client.pool_client import PoolClient
from ems.pool.protocol.acts import Drain
from ems.pool.tiers.cluster.agent import NO_SECRET, RAMP_LEAST, RAMP_PARTS, ramp
from ems.pool.tiers.cluster.agent_process import STORE_LANES
from ems.pool.tiers.cluster.objects import Objects
from ems.pool.tiers.pack_seal import SealKeys
from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.tiers import key, page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, start_master, write_settings
from tests.pool.tiers.pages import read, save, wait_for

pytestmark = pytest.mark.process
PAGE = 64 << 10
NAMESPACE = Namespace("tenant/model/layout", PAGE)
FLAGS = ("--size", "16MB", "--segment-size", "4MB", "--tier")
PATIENCE = 90.0
CLIENT_TTL = 2
LENDING_ARGUMENTS = 4 + STORE_LANES
"""Python, the module and one socket: one that moves pages has more sockets."""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with start_master(tmp_path, f"--client_ttl={CLIENT_TTL}") as running:
        yield running


@pytest.fixture
def start(tmp_path: Path, master: MooncakeMaster, make_node: MakeNode) -> Callable[[], NodeProcess]:
    def make() -> NodeProcess:
        node = make_node(*FLAGS, f"mooncake:{write_settings(tmp_path, master.endpoint)}?refresh=1s&copy_ahead=never")
        node.wait_touched()
        return node

    return make


def chain(name: str, length: int = 12) -> list[bytes]:
    return [key(f"{name}/{block}") for block in range(length)]


def write(node: NodeProcess, client: PoolClient, keys: list[bytes]) -> None:
    """Have the cluster keep ``keys``."""
    before = cluster(node)["pages_written"]
    assert save(client, NAMESPACE, keys) == len(keys)
    until(lambda: cluster(node)["pages_written"] >= before + len(keys), "all was written", PATIENCE)


def capacity(master: MooncakeMaster) -> float:
    return master.metrics()["master_total_capacity_bytes"]


def test_a_host_that_leaves_gives_what_is_hot_to_others(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    leaving, staying = start(), start()
    writer, reader = make_client(leaving), make_client(staying)
    until(lambda: capacity(master) == 128 << 20, "both lend memory", PATIENCE)
    keys = chain("a")
    write(leaving, writer, keys)
    assert writer.administer(Drain())["pages_leaving"] > 0
    until(lambda: writer.administer(Drain(), dry_run=True)["pages_leaving"] == 0, "all was given", PATIENCE)
    assert capacity(master) == 64 << 20
    leaving.stop()
    wait_for(reader, NAMESPACE, keys, PATIENCE)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


def test_a_host_that_leaves_gives_what_is_hot_also_where_a_store_fails_meanwhile(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    leaving, staying = start(), start()
    writer, reader = make_client(leaving), make_client(staying)
    until(lambda: capacity(master) == 128 << 20, "both lend memory", PATIENCE)
    keys = chain("a")
    write(leaving, writer, keys)
    (mover,) = (one for one in psutil.Process(leaving.pid).children() if len(one.cmdline()) > LENDING_ARGUMENTS)
    mover.suspend()
    writer.administer(Drain())
    until(lambda: capacity(master) == 64 << 20, "it lends none any more", PATIENCE)
    until(lambda: cluster(leaving)["queued_bytes"], "it is storing", PATIENCE)
    mover.kill()
    until(lambda: not cluster(leaving)["writing"], "the store has failed", PATIENCE)
    until(lambda: writer.administer(Drain(), dry_run=True)["pages_leaving"] == 0, "all was given", PATIENCE)
    assert writer.administer(Drain(), dry_run=True)["pages_given"] == len(keys)
    leaving.stop()
    wait_for(reader, NAMESPACE, keys, PATIENCE)


def test_nobody_waits_for_long_to_give_what_nobody_takes(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    leaving = start()
    client = make_client(leaving)
    until(lambda: capacity(master) == 64 << 20, "it lends memory", PATIENCE)
    write(leaving, client, chain("a"))
    master.kill()
    client.administer(Drain())
    until(lambda: client.administer(Drain(), dry_run=True)["pages_leaving"] == 0, "it gives up", PATIENCE)
    (why,) = client.administer(Drain(), dry_run=True)["left_alone"]
    assert "mooncake:" in why


@pytest.mark.parametrize("written", [1, 40, 200])
def test_a_node_that_dies_while_it_stores_takes_what_it_lent_with_it(
    tmp_path: Path, make_node: MakeNode, make_client: MakeClient, written: int
) -> None:
    """Others would ask for it as long as the master waits for a host, which here is for ever."""
    with start_master(tmp_path, "--client_ttl=3600") as patient, ThreadPoolExecutor(1) as threads:
        node = make_node(*FLAGS, f"mooncake:{write_settings(tmp_path, patient.endpoint)}?copy_ahead=never")
        client = make_client(node)
        until(lambda: capacity(patient) == 64 << 20, "it lends memory", PATIENCE)

        def save_on() -> None:
            for number in itertools.count():
                save(client, NAMESPACE, chain(f"{number}"))

        saving = threads.submit(save_on)
        until(lambda: cluster(node)["pages_written"] >= written, "it stores", PATIENCE)
        node.kill()
        assert isinstance(saving.exception(PATIENCE), EmsError)
        until(lambda: capacity(patient) == 0, "nothing is lent", PATIENCE)


def test_a_host_that_stays_after_all_lends_memory_again(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    node = start()
    client = make_client(node)
    until(lambda: capacity(master) == 64 << 20, "it lends memory", PATIENCE)
    client.administer(Drain())
    until(lambda: capacity(master) == 0, "it lends none any more", PATIENCE)
    assert client.administer(Drain(draining=False))["pages_leaving"] == 0
    until(lambda: capacity(master) == 64 << 20, "it lends memory again", PATIENCE)


def test_what_was_lent_and_is_lost_is_offered_again(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    """As where a host was cut off for longer than the master waits for it."""
    first, second = start(), start()
    writer, reader = make_client(first), make_client(second)
    keys = chain("a")
    write(first, writer, keys)
    agents = psutil.Process(first.pid).children()
    for agent in agents:
        agent.send_signal(signal.SIGSTOP)
    try:
        until(lambda: capacity(master) == 64 << 20, "the master forgets the first host", PATIENCE)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGCONT)
    wait_for(reader, NAMESPACE, keys, PATIENCE)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


def test_a_master_that_is_back_without_what_it_knew_gets_what_is_hot(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    first, second = start(), start()
    writer, reader = make_client(first), make_client(second)
    keys = chain("a")
    write(first, writer, keys)
    master.kill()
    assert read(writer, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
    master.start()
    wait_for(reader, NAMESPACE, keys, PATIENCE)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


REMOVE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
assert store.remove_by_regex(sys.argv[2], force=True) == int(sys.argv[3])
os._exit(0)
"""


def test_what_a_standby_had_not_heard_of_when_it_took_over_is_offered_again(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    """What was stored last is unknown to it, what the hosts lend is not: so removed from a master, and a cut."""
    first, second = start(), start()
    writer, reader = make_client(first), make_client(second)
    keys = chain("a")
    write(first, writer, keys)
    names = Objects(SealKeys(NO_SECRET, encrypts=False)).of(NAMESPACE.name)
    assert names is not None
    arguments = (master.endpoint, names.all_names, str(len(keys)))
    done = subprocess.run([sys.executable, "-c", REMOVE, *arguments], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-1000:]
    (moves,) = [one for one in psutil.Process(first.pid).children() if len(one.cmdline()) != LENDING_ARGUMENTS]
    moves.send_signal(signal.SIGSTOP)
    save(writer, NAMESPACE, chain("b"))
    until(lambda: cluster(first)["cuts"] > 0, "a write does not end", PATIENCE)
    wait_for(reader, NAMESPACE, keys, PATIENCE)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


def test_what_is_saved_while_the_master_is_away_comes_later(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    first, second = start(), start()
    writer, reader = make_client(first), make_client(second)
    write(first, writer, chain("a"))
    master.kill()
    failed, refused = chain("b"), chain("c")
    save(writer, NAMESPACE, failed)
    until(lambda: not cluster(first)["writing"], "nothing is written any more", PATIENCE)
    save(writer, NAMESPACE, refused)
    master.start()
    for keys in (failed, refused):
        wait_for(reader, NAMESPACE, keys, PATIENCE)
        assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


def test_an_agent_that_lends_memory_and_hangs_is_replaced(
    start: Callable[[], NodeProcess], master: MooncakeMaster, make_client: MakeClient
) -> None:
    first, second = start(), start()
    writer, reader = make_client(first), make_client(second)
    keys = chain("a")
    write(first, writer, keys)
    (lends,) = [one for one in psutil.Process(first.pid).children() if len(one.cmdline()) == LENDING_ARGUMENTS]
    lends.send_signal(signal.SIGSTOP)
    until(lambda: not lends.is_running(), "it is ended", PATIENCE)
    wait_for(reader, NAMESPACE, keys, PATIENCE)
    assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]


def test_a_tier_is_said_to_be_well_when_its_client_is_there(start: Callable[[], NodeProcess]) -> None:
    figures = start().figures()
    waits = "starts, Mooncake's client is not there yet"
    for starts, said, seen in ((1, "well", "works"), (0, waits, waits)):
        figures["tiers"][0] |= {"tier_agent_starts": starts, "reading": True, "writing": True}
        row = dict(summary_rows(figures))["tier"]
        assert "put there 0 B, 0 pages" in row
        assert row.endswith(said)
        assert judge(figures)[-1].seen == seen
    figures["tiers"][0] |= {"reading": False, "reason": "no master answers"}
    assert dict(summary_rows(figures))["tier"].endswith("left alone (reading): no master answers")


@pytest.mark.parametrize("size", [0, 1, RAMP_LEAST, RAMP_LEAST + 1, 16 << 30, (16 << 30) + 1, 3355443200])
def test_memory_is_lent_in_parts(size: int) -> None:
    parts = ramp(size)
    assert sum(parts) == size
    assert len(parts) <= RAMP_PARTS
    assert all(part >= min(RAMP_LEAST, size) for part in parts[:-1])


def test_a_host_that_joins_lends_a_part_at_first_and_all_in_the_end(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode
) -> None:
    size = RAMP_LEAST + (64 << 20)
    make_node(*FLAGS, f"mooncake:{write_settings(tmp_path, master.endpoint, global_segment_size=size)}")
    until(lambda: capacity(master) >= RAMP_LEAST, "it lends a part", PATIENCE)
    until(lambda: capacity(master) == size, "it lends all", PATIENCE)
