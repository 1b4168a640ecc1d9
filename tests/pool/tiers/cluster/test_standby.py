"""A Mooncake master that is lost while another one stands by: nothing fails, and the cluster is there again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from ems.pool.client.answers import Namespace
from tests.kit.mooncake import Etcd, MooncakeMaster
from tests.kit.tiers import key, page
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, write_settings
from tests.pool.tiers.pages import read, save, wait_for

pytestmark = pytest.mark.process
PAGE = 64 << 10
NAMESPACE = Namespace("tenant/model/layout", PAGE)
PATIENCE = 180.0
"""A standby leads after some ten seconds on a machine with nothing else to do."""


def test_a_standby_takes_over_and_what_was_there_is_found(
    tmp_path: Path, make_node: MakeNode, make_client: MakeClient
) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(Etcd(tmp_path))
        leader, _ = [stack.enter_context(MooncakeMaster(tmp_path, etcd=etcd, name=name)) for name in ("one", "two")]
        tier = f"mooncake:{write_settings(tmp_path, leader.endpoint)}?refresh=1s&copy_ahead=never"
        first, second = (make_node("--size", "16MB", "--segment-size", "4MB", "--tier", tier) for _ in range(2))
        writer, reader = make_client(first), make_client(second)
        before, after = ([key(f"{name}/{block}") for block in range(12)] for name in ("before", "after"))
        assert save(writer, NAMESPACE, before) == len(before)
        until(lambda: cluster(first)["pages_written"] >= len(before), "all was written", PATIENCE)
        leader.kill()
        assert read(writer, NAMESPACE, before) == [page(one, PAGE) for one in before], "its own memory is as it was"
        assert save(writer, NAMESPACE, after) == len(after)
        for keys in (before, after):
            wait_for(reader, NAMESPACE, keys, PATIENCE)
            assert read(reader, NAMESPACE, keys) == [page(one, PAGE) for one in keys]
