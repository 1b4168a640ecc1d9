"""A node in this process with a tier below it that can be made to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from ems.config import NodeConfig
from ems.pool.core.eviction import evict
from ems.pool.keys import NO_PARENT
from ems.pool.layout import PageRef
from ems.pool.node.pool_node import Node
from ems.pool.pages import ClusterWrite, Page
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.manager import TierManager
from ems.pool.tiers.settings import TierConfig
from tests.kit.tiers import KEYS, key, page
from tests.pool.segment_memory import page_memory
from tests.pool.tiers.faulty_tier import FaultyTier

NAME = "t/m/l"


PAGE = 4096


PATIENCE = 20.0


class Bench:
    """A node without clients, its carrier, and a tier that can be made to fail."""

    def __init__(self, folder: Path, **settings: object) -> None:
        config = NodeConfig(
            directory=folder / "pool", socket=folder / "s", size=2 << 20, segment_size=1 << 20, http_port=None
        )
        self.node = Node(config)
        self.folder = folder / "tier"
        self.tier = FaultyTier("dir", FolderBlobs(self.folder), KEYS)
        self.config = TierConfig(**{"kind": "dir", "place": str(self.folder), **settings})  # type: ignore[arg-type]
        self.node.tier_manager = self.tier_manager = TierManager(self.node, [(self.config, self.tier)])
        self.state = self.tier_manager.states[0]
        self.node.start()
        self.namespace = self.node.core.open_namespace(NAME, PAGE)

    async def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            await asyncio.sleep(0.005)  # bounded by the deadline of this loop

    def save(self, keys: list[bytes], client_id: int = 1, cluster_write: ClusterWrite = "") -> int:
        reserved = self.node.promise(client_id, self.namespace, bytes(NO_PARENT), keys)
        for granted in reserved.granted:
            self.memory(granted)[:] = page(granted.key)
        if reserved.granted:
            done = self.node.storing.commit(client_id, reserved.reservation)
            self.tier_manager.committed(self.namespace, done.pages, cluster_write)
        return len(reserved.granted)

    def forget(self) -> None:
        """Memory loses all pages that nobody holds."""
        space = self.node.core.namespaces[self.namespace]
        while evict(space.index, len(space.index), self._free, space.pins):
            pass

    def _free(self, one: Page) -> None:
        self.node.core.slots.give_back(one.ref)

    def present(self, keys: list[bytes]) -> int:
        return len(self.node.core.reading.lookup(9, self.namespace, keys, lease=False).pages)

    def look(self, keys: list[bytes]) -> int:
        return self.tier_manager.looked_up(self.namespace, keys, self.present(keys)).keys

    def right(self, keys: list[bytes]) -> bool:
        pages = self.node.core.reading.lookup(9, self.namespace, keys, lease=False).pages
        return all(bytes(self.memory(one)) == page(one.key) for one in pages)

    def memory(self, one: Page) -> memoryview:
        return page_memory(self.node.arena, PageRef.unpack(one.ref), PAGE)

    def nothing_is_held(self) -> bool:
        stats = self.node.core.stats()
        return not (stats["leases"] or stats["reservations"] or stats["slots_resting"])


def chain(name: str, length: int) -> list[bytes]:
    return [key(f"{name}/{block}") for block in range(length)]


async def stored(bench: Bench, keys: list[bytes]) -> None:
    await bench.until(lambda: bench.node.core.stats()["bytes_touched"] == 2 << 20)
    bench.save(keys)
    await bench.until(lambda: bench.state.counts["pages_written"] >= len(keys))
    await bench.until(bench.nothing_is_held)
