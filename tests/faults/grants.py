"""What must hold when a node grants memory: nobody else writes there, nobody lost what it was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ems.pool.layout import PageRef, slot_offset
from ems.pool.pages import Outcome
from tests.faults.settings import Violation
from tests.faults.simulated_clients import identity

if TYPE_CHECKING:
    from ems.pool.core.namespaces import NamespacePages
    from ems.pool.core.writing import Reserved
    from ems.pool.pages import Page
    from tests.faults.node import HistoryNode
    from tests.faults.world import World


def granting(world: World, node: HistoryNode, namespace: int, keys: list[bytes]) -> Callable[[Reserved], None]:
    """Look before a reservation behind ``keys[0]``; what is returned looks when it was made."""
    ns = node.core.namespaces[namespace] if 0 <= namespace < len(node.core.namespaces) else None
    before = _held(node)
    awaited, others = ([], []) if ns is None else _staying(ns, keys)
    namespaces = [segment.namespace for segment in node.core.slots.segments]

    def granted(reserved: Reserved) -> None:
        assert ns is not None
        refs = [PageRef.unpack(page.ref) for page in reserved.granted]
        if refs and node.core.draining:
            raise Violation("a node that drains takes a page in")
        for ref in refs:
            world.hurt_headers.discard(ref[:2])
            see_grant(world, ref, reserved.page_size)
            if node.core.segment_tenant(ref.segment) != ns.tenant:
                raise Violation(f"a page of {ns.name} was granted in memory of another tenant")
        world.heal()
        _see_quotas(node, ns, before, _held(node))
        for number, was in enumerate(namespaces):
            segment = node.core.slots.segments[number]
            if was is not None and segment.namespace != was:
                world.counts["segment taken from another"] += 1
                if node.core.namespaces[was].tenant != ns.tenant:
                    world.counts["segment taken from another tenant"] += 1
        lost = namespaces.count(namespace) - [one.namespace for one in node.core.slots.segments].count(namespace)
        left = [page for page in awaited if ns.index.get(page.key) is not page]
        stays = [page for page in others if ns.index.get(page.key) is page]
        world.counts["awaited page evicted"] += len(left)
        if left and stays and lost <= 0:
            raise Violation("a page that a request waits for left while others could")
        world.counts["refused for want of room"] += reserved.outcomes.count(Outcome.NO_SPACE)

    return granted


def see_grant(world: World, ref: PageRef, size: int) -> None:
    """A slot was promised into which nobody else may write any more."""
    file = identity(world.node.arena._files[ref.segment].descriptor)
    of_segment = world.node.arena.sizes[ref.segment]
    begin = slot_offset(of_segment, size, ref.slot)
    for late in world.late:
        other_begin = slot_offset(of_segment, late.size, late.ref.slot)
        overlaps = other_begin < begin + size and begin < other_begin + late.size
        if late.file == file and overlaps and not late.loose:
            raise Violation("a slot was handed out while another writer may still write into it")
    for other, length, into in world.node.fetching_into():
        other_begin = slot_offset(of_segment, length, other.slot)
        if into == file and other_begin < begin + size and begin < other_begin + length:
            raise Violation("a slot was handed out while a thread of a tier may still write into it")


def _held(node: HistoryNode) -> Counter[str]:
    """Bytes of the segments of each tenant."""
    held: Counter[str] = Counter()
    for segment in node.core.slots.segments:
        if segment.namespace is not None:
            held[node.core.namespaces[segment.namespace].tenant] += segment.size
    return held


def _see_quotas(node: HistoryNode, ns: NamespacePages, before: Counter[str], after: Counter[str]) -> None:
    for tenant in before | after:
        bounds = node.core.shares.bounds(tenant)
        if before[tenant] == after[tenant]:
            continue
        if after[tenant] > before[tenant] and after[tenant] > bounds.cap:
            raise Violation(f"{tenant} got {after[tenant]} bytes, its cap is {bounds.cap}")
        if after[tenant] < before[tenant] and tenant != ns.tenant and after[tenant] < bounds.minimum:
            raise Violation(f"{tenant} was left {after[tenant]} bytes, it was guaranteed {bounds.minimum}")


def _staying(ns: NamespacePages, keys: list[bytes]) -> tuple[list[Page], list[Page]]:
    """Pages of a namespace that requests wait for, and those that can leave before them."""
    pins = ns.pins
    if not pins.awaited:
        return [], []
    awaited, others = [], []
    for page in ns.index:
        if not page.present or page.key in pins.pinned or page.key in keys:
            continue
        if page.key in pins.awaited:
            awaited.append(page)
        elif not page.leases and page.suffixes is None:
            others.append(page)
    return awaited, others
