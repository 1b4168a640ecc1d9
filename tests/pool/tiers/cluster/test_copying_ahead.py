"""What is hot on one host is in the memory of the others before they are asked: nodes with a real Mooncake master."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.pool.keys import Tail
from tests.kit.mooncake import MooncakeMaster
from tests.kit.node import NodeProcess
from tests.kit.tiers import page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, start_master, write_settings
from tests.pool.tiers.cluster.test_two_nodes import NAMESPACE, PAGE, SIZE, chain
from tests.pool.tiers.pages import look, read, save

pytestmark = pytest.mark.process


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


def test_what_one_host_uses_again_another_has_in_memory(
    tmp_path: Path, master: MooncakeMaster, make_node: MakeNode, make_client: MakeClient
) -> None:
    first, second = start(make_node, tmp_path, master, *["copy_ahead=on_second_use"] * 2)
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
