"""What must hold when a node grants memory: nobody else writes there, nobody lost what it was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ems.pool.core.room import Outcome
from ems.pool.segments.layout import PageRef
from ems.testing.faults.seats import identity
from ems.testing.faults.settings import Violation

if TYPE_CHECKING:
    from ems.pool.core.answers import Reserved
    from ems.pool.core.index import Page
    from ems.pool.core.namespaces import NamespacePages
    from ems.testing.faults.node import HistoryNode
    from ems.testing.faults.world import World


def granting(world: World, node: HistoryNode, namespace: int, keys: list[bytes]) -> Callable[[Reserved], None]:
    """Look before a reservation behind ``keys[0]``; what is returned looks when it was made."""
    space = node.core.namespaces[namespace] if 0 <= namespace < len(node.core.namespaces) else None
    before = _held(node)
    awaited, others = ([], []) if space is None else _staying(space, keys)
    owners = [segment.owner for segment in node.core.space.segments]

    def granted(reserved: Reserved) -> None:
        assert space is not None
        refs = [PageRef.unpack(page.ref) for page in reserved.granted]
        if refs and node.core.draining:
            raise Violation("a node that drains takes a page in")
        for ref in refs:
            world.hurt_headers.discard(ref[:2])
            see_grant(world, ref, reserved.page_size)
            if node.core.segment_tenant(ref.segment) != space.tenant:
                raise Violation(f"a page of {space.name} was granted in memory of another tenant")
        world.heal()
        _see_quotas(node, space, before, _held(node))
        for number, was in enumerate(owners):
            segment = node.core.space.segments[number]
            if was is not None and segment.owner != was:
                world.counts["segment taken from another"] += 1
                if node.core.namespaces[was].tenant != space.tenant:
                    world.counts["segment taken from another tenant"] += 1
        lost = owners.count(namespace) - [one.owner for one in node.core.space.segments].count(namespace)
        left = [page for page in awaited if space.index.get(page.key) is not page]
        stays = [page for page in others if space.index.get(page.key) is page]
        world.counts["awaited page evicted"] += len(left)
        if left and stays and lost <= 0:
            raise Violation("a page that a request waits for left while others could")
        world.counts["refused for want of room"] += reserved.outcomes.count(Outcome.NO_SPACE)

    return granted


def see_grant(world: World, ref: PageRef, size: int) -> None:
    """A slot was promised into which nobody else may write any more."""
    for late in world.late:
        overlaps = late.ref.offset < ref.offset + size and ref.offset < late.ref.offset + late.size
        writes = (
            late.until > world.now and late.ref.segment == ref.segment and late.maps.shares(world.node, ref.segment)
        )
        if writes and overlaps and not late.loose:
            raise Violation("a slot was handed out while another writer may still write into it")
    file = identity(world.node.arena.descriptor(ref.segment))
    for node in (world.node, *(one.node for one in world.former)):
        for other, length, into in node.fetching_into():
            if into == file and other.offset < ref.offset + size and ref.offset < other.offset + length:
                raise Violation("a slot was handed out while a thread of a tier may still write into it")


def _held(node: HistoryNode) -> Counter[str]:
    """Bytes of the segments of each tenant."""
    held: Counter[str] = Counter()
    for segment in node.core.space.segments:
        if segment.owner is not None:
            held[node.core.namespaces[segment.owner].tenant] += segment.size
    return held


def _see_quotas(node: HistoryNode, space: NamespacePages, before: Counter[str], after: Counter[str]) -> None:
    for tenant in before | after:
        bounds = node.core.shares.bounds(tenant)
        if bounds is None or before[tenant] == after[tenant]:
            continue
        if after[tenant] > before[tenant] and after[tenant] > bounds.cap:
            raise Violation(f"{tenant} got {after[tenant]} bytes, its cap is {bounds.cap}")
        if after[tenant] < before[tenant] and tenant != space.tenant and after[tenant] < bounds.minimum:
            raise Violation(f"{tenant} was left {after[tenant]} bytes, it was guaranteed {bounds.minimum}")


def _staying(space: NamespacePages, keys: list[bytes]) -> tuple[list[Page], list[Page]]:
    """Pages of a namespace that requests wait for, and those that can leave before them."""
    kept = space.kept
    if not kept.awaited:
        return [], []
    awaited, others = [], []
    for page in space.index:
        if not page.present or page.key in kept.pinned or page.key in keys:
            continue
        if page.key in kept.awaited:
            awaited.append(page)
        elif not page.leases and page.suffixes is None:
            others.append(page)
    return awaited, others
