"""What others are told of a cluster's pages (KV events), with two nodes and a real Mooncake master."""

from __future__ import annotations

from pathlib import Path

import pytest

from ems.pool.client.answers import Namespace, PageLocation
from ems.pool.client.pool_client import PoolClient
from ems.pool.keys import KEY_BYTES
from ems.pool.media import EXTERNAL, named
from ems.pool.protocol.acts import Clear
from tests.kit.tiers import key
from tests.kit.waiting import until
from tests.pool.conftest import MakeClient, MakeNode
from tests.pool.tiers.cluster.hosts import cluster, start_master, write_settings
from tests.pool.tiers.pages import save, wait_for

pytestmark = pytest.mark.process
PAGE = 64 << 10
NAMESPACE = Namespace("tenant/model/layout", PAGE)
SIZE = ("--size", "16MB", "--segment-size", "4MB")


class Listener:
    """Follows what a node tells of the cluster."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._place: PageLocation | None = None
        self.there: set[bytes] = set()
        self.look()

    def look(self) -> set[bytes]:
        told = self._client.changes(self._place, [named(NAMESPACE.name, EXTERNAL)], 5.0)
        assert not told.lost
        self._place = told.place
        for run in told.runs:
            keys = {run.keys[at : at + KEY_BYTES] for at in range(0, len(run.keys), KEY_BYTES)}
            self.there = self.there | keys if run.stored else self.there - keys
        return self.there


def test_each_host_tells_what_it_stored_in_a_cluster_and_what_it_found_there(
    tmp_path: Path, make_node: MakeNode, make_client: MakeClient
) -> None:
    with start_master(tmp_path) as master:
        settings = f"mooncake:{write_settings(tmp_path, master.endpoint)}"
        first, second = (make_node(*SIZE, "--tier", settings) for _ in range(2))
        for node in (first, second):
            node.wait_touched()
        of_first, of_second = Listener(make_client(first)), Listener(make_client(second))
        keys = [key(f"a/{block}") for block in range(8)]
        save(make_client(first), NAMESPACE, keys)
        until(lambda: cluster(first)["pages_written"] >= len(keys), "all was written", 45)
        until(lambda: of_first.look() == set(keys), "the first host tells what it stored", 45)
        assert of_second.look() == set()

        wait_for(make_client(second), NAMESPACE, keys)
        assert of_second.look() == set(keys)

        administrator = PoolClient(first.socket, "test", administers=True)
        administrator.administer(Clear(everything=True), timeout=45)
        administrator.close()
        until(lambda: of_first.look() == set(), "what was cleared is taken back", 45)
