"""A node's metrics are named as Prometheus wants them, are all in the reference, and cost few series."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ems.config import NodeConfig
from ems.pool.http.metrics import MOST_NAMESPACES, PoolCollector
from ems.pool.node.pool_node import Node
from ems.pool.protocol import messages
from tests.metric_rules import broken_rules, families, listed
from tests.pool.brain import chain

PAGE = 4096


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with a tier, that nobody can reach."""
    config = NodeConfig(
        directory=tmp_path / "pool", size=1 << 20, segment_size=64 << 10, tiers=(f"dir:{tmp_path / 'tier'}",)
    )
    made = Node(config)
    for number, size in enumerate(made.arena.sizes):
        made.core.slots.touch(number, size)
    yield made
    made.close()


def page_of(node: Node) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PoolCollector(node.figures, node.handler.measured))
    return generate_latest(registry).decode()


async def test_names_follow_the_rules_and_all_are_in_the_reference(node: Node) -> None:
    page = page_of(node)
    assert broken_rules(page, prefix="ems_") == []
    assert families(page) == listed("ems_pool_") | listed("ems_build_info")


async def test_requests_and_the_bytes_that_they_move_are_measured(node: Node) -> None:
    keys = chain("x", 3)
    number = node.core.open_namespace("name", PAGE)
    granted = node.answer(1, messages.Reserve(number, bytes(16), b"".join(keys)))
    assert isinstance(granted, messages.Granted)
    node.answer(1, messages.Commit(granted.reservation, None))
    node.answer(1, messages.Lookup(number, b"".join(keys[:2]), lease=True))
    node.answer(1, messages.Lookup(number, b"".join(keys), lease=False))
    samples = {
        (sample.name, sample.labels.get("message"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(page_of(node))
        for sample in family.samples
    }
    count = "ems_pool_request_duration_seconds_count"
    assert [samples[count, name, None] for name in ("Reserve", "Commit", "Lookup", "Abort")] == [1, 1, 2, 0]
    assert samples["ems_pool_saved_bytes_sum", None, None] == 3 * PAGE
    assert samples["ems_pool_loaded_bytes_sum", None, None] == 2 * PAGE
    assert samples["ems_pool_loaded_bytes_count", None, None] == 1


async def test_namespaces_by_the_thousand_are_few_series(node: Node) -> None:
    for one in range(2 * MOST_NAMESPACES):
        node.core.open_namespace(f"name {one}", PAGE)
    granted = node.answer(1, messages.Reserve(node.core.find_namespace("name 150"), bytes(16), chain("x", 1)[0]))
    assert isinstance(granted, messages.Granted)
    node.answer(1, messages.Commit(granted.reservation, None))
    pages = [line for line in page_of(node).splitlines() if line.startswith("ems_pool_namespace_pages{")]
    assert len(pages) == MOST_NAMESPACES
    assert 'ems_pool_namespace_pages{namespace="name 150"} 1.0' in pages
    assert f"\nems_pool_namespaces {float(2 * MOST_NAMESPACES)}\n" in page_of(node)
