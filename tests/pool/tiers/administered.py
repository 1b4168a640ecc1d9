"""A node with a real directory below it, and an administrator who looks after it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ems.pool.keys import NO_PARENT
from ems.pool.node.admin_runner import AdminRunner
from ems.pool.protocol.acts import Acts, Follow
from ems.pool.tenants.gate import Peer
from ems.pool.tiers.answers import Stored
from ems.pool.tiers.directory import FolderBlobs
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers import KEYS, page
from tests.pool.tiers.node_with_tier import NAME, Bench
from tests.pool.wrong_core import wrong_core

ME = Peer(os.getpid(), os.geteuid())
OTHER = "tenant/other/layout"


class Administered(Bench):
    """A node with a tier that an administrator looks after."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, **settings)
        self.node.admin = AdminRunner(self.node)

    async def do(self, act: Acts, *, dry_run: bool = False) -> dict[str, Any]:
        """The report at the end of what ``act`` began."""
        report = self.node.admin.do(ME, act, dry_run=dry_run)

        def done() -> bool:
            nonlocal report
            if not report.get("done", True):
                report = report | self.node.admin.do(ME, Follow(report["job"]), dry_run=False)
            return bool(report.get("done", True))

        await self.until(done)
        return report

    def in_tier(self, keys: list[bytes], name: str = NAME) -> int:
        """How many of ``keys`` the tier's place has, seen by a node that starts now."""
        fresh = PackTier("fresh", FolderBlobs(self.folder), KEYS)
        fresh.maintain()
        return sum(fresh.holds(name, [one]) for one in keys)


def below(folder: Path, name: str, keys: list[bytes], parent: bytes = bytes(NO_PARENT)) -> None:
    """Another node stores pages of the namespace ``name``, unknown to this one, behind the block ``parent``."""
    parents = [parent, *keys]
    pages = [Stored(one, before, None, memoryview(page(one))) for one, before in zip(keys, parents, strict=False)]
    PackTier("other", FolderBlobs(folder), KEYS).store(name, pages)


@asynccontextmanager
async def administered(folder: Path) -> AsyncIterator[Callable[..., Administered]]:
    """Makes nodes, which hold nothing at the end and whose books are right."""
    made: list[Administered] = []

    def make(**settings: object) -> Administered:
        made.append(Administered(folder, **settings))
        return made[-1]

    yield make
    for one in made:
        one.tier.gate.set()
        await one.until(one.nothing_is_held)
        assert wrong_core(one.node.core) == []
        assert not one.tier_manager._held_back
        one.node.close()
