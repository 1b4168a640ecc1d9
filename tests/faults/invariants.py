"""What must hold after every step of a history, and what must be left at its end.

After every step: the brain agrees with itself; every page has its bytes unless its own place was damaged; a lease and a
pin hold; no tenant maps another's memory, nobody is in whose key is over; what tiers hold of memory is what they work
on.  At the end, when everybody has gone and nothing is wrong any more: nobody holds anything, nothing rests or waits,
and every tier is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ems.pool.layout import UNKNOWN, PageRef
from ems.pool.reasons.words import Reason
from ems.pool.segments.recovery import recover
from tests.faults.settings import Violation, content, size_of
from tests.faults.simulated_clients import identity
from tests.pool.segment_memory import page_memory
from tests.pool.wrong import wrong_catalogue, wrong_promotions, wrong_queue
from tests.pool.wrong_core import wrong_core

if TYPE_CHECKING:
    from ems.pool.pages import Page
    from ems.pool.tiers.packs import PackTier
    from tests.faults.settings import Known
    from tests.faults.world import World

MAY_END_PINS = {Reason.CHECKSUM.code, Reason.EVICTED_RESIZE.code}
"""Why a pinned page may leave."""


def check(world: World) -> None:
    """Everything that must hold after each step.

    Raises:
        Violation: it does not.
    """
    broken = wrong_core(world.node.core)
    if broken:
        raise Violation(broken[0])
    pages = world.pages()
    _bytes_are_right(world, pages)
    world.account()
    _leases_hold(world, pages)
    _pins_hold(world, pages)
    if world.tenants is not None:
        _tenants_are_apart(world)
    if world.below.places:
        _tiers_add_up(world)


def _bytes_are_right(world: World, pages: dict[Known, Page]) -> None:
    for (name, key), page in pages.items():
        if page.present:
            ref = PageRef.unpack(page.ref)
            data = page_memory(world.node.arena, ref, size_of(name))
            if data != content(name, key) and ref[:3] not in world.hurt:
                raise Violation(f"page {key.hex()} of {name} has other bytes than were committed")


def _leases_hold(world: World, pages: dict[Known, Page]) -> None:
    for client in world.clients:
        for reading in client.reading:
            for key, ref in zip(reading.keys, reading.refs, strict=True):
                known = pages.get((reading.name, key))
                there = known is not None and known.ref == ref.pack()
                excused = ref[:3] in world.hurt or ref[:2] in world.hurt_headers
                if reading.leased and reading.life == world.life and not there and not excused:
                    raise Violation(f"page {key.hex()} left while it was leased")


def _pins_hold(world: World, pages: dict[Known, Page]) -> None:
    for known, until in list(world.pinned.items()):
        page = pages.get(known)
        if page is not None and page.present and until > world.now:
            continue
        del world.pinned[known]
        if until > world.now and world.node.core.reading.explain(known[0], [known[1]]).codes[0] not in MAY_END_PINS:
            raise Violation(f"page {known[1].hex()} of {known[0]} left while it was pinned")


def _tenants_are_apart(world: World) -> None:
    assert world.tenants is not None
    core = world.node.core
    for segment in core.slots.segments:
        if segment.namespace is None:
            continue
        mapped = world.mapped.get(identity(world.node.arena._files[segment.number].descriptor), set())
        if mapped - {core.namespaces[segment.namespace].tenant}:
            raise Violation(f"segment {segment.number} has pages of one tenant and is mapped by another")


def keys_are_good(world: World) -> None:
    """Right after the node has looked: nobody is in whose key opens nothing."""
    if world.tenants is not None:
        for principal in world.node.clients.principals.values():
            if principal.stores and not world.tenants.valid(principal):
                raise Violation(f"{principal.tenant} is still in, with a key that was revoked or is over")


def _tiers_add_up(world: World) -> None:
    tier_manager, core = world.node.tier_manager, world.node.core
    broken = wrong_promotions(tier_manager._promotions)
    leases: set[int] = set()
    client_ids: set[int] = set()
    promoting: set[tuple[int, bytes]] = set()
    under_way = 0
    for state in tier_manager.states:
        broken += wrong_queue(state.write_back) + wrong_catalogue(cast("PackTier", state.tier)._catalogue)
        waiting = [unit for units in state.write_back._waiting.values() for unit in units]
        units = [*waiting, *(unit for written in state.writes.values() for unit in written)]
        leases |= {unit.lease for unit in units}
        if state.write_back.size != sum(unit.size for unit in units):
            broken.append(f"{state.write_back.size} bytes are said to be queued for a tier, or being written")
        for job, (client_id, portion) in state.fetches.items():
            if not job.abandoned:
                client_ids.add(client_id)
                under_way += portion.size
                promoting.update((portion.namespace, key) for key in portion.keys)
    held = {number for number, lease in core.leases.all.items() if lease.client_id == tier_manager._writer}
    if held != leases:
        broken.append(f"tiers hold {len(held)} leases, {len(leases)} of them for what is to be written")
    if {one.client_id for one in core.reservations.all.values() if one.client_id < 0} - client_ids:
        broken.append("memory is reserved for a tier that fetches nothing into it")
    if tier_manager._promotions.under_way != under_way:
        broken.append(f"{tier_manager._promotions.under_way} bytes are said to be fetched, {under_way} are")
    if tier_manager._promoting.keys() - promoting:
        broken.append("a key is said to be fetched that is not")
    if broken:
        raise Violation(broken[0])


def nothing_hangs(world: World) -> None:
    """Right after the node has looked: nobody waits for a tier longer than it may take."""
    now = world.now
    for state in world.node.tier_manager.states:
        for job in (*state.fetches, *state.writes):
            if not job.abandoned and job.started_at is not None and now - job.started_at > state.config.timeout:
                raise Violation(f"a tier takes {now - job.started_at:.0f} s, and is still waited for")


def all_work(world: World) -> bool:
    """Whether every tier is asked."""
    return all(state.reading.open and state.writing.open for state in world.node.tier_manager.states)


def headers_agree(world: World) -> None:
    """What a node that began now would find is what this one knows."""
    images = [image for image in world.node.arena.images() if world.node.core.slots.segments[image.number].size]
    told = {(pages.name, key) for pages in recover(images).namespaces for key, _, _ in pages.pages}
    known = {known for known, page in world.pages().items() if page.present}
    excused = {
        one
        for one, page in world.pages().items()
        if PageRef.unpack(page.ref)[:2] in world.hurt_headers or page.segment in world.hurt_segments
    }
    if told - world.ever or (told ^ known) - excused - {one for one in told if world.hurt_headers}:
        raise Violation("headers and brain do not agree")


def nothing_held(world: World) -> None:
    """Everybody has gone and nothing is wrong.

    Raises:
        Violation: something is held all the same.
    """
    node = world.node
    stats = node.core.stats()
    for what in ("leases", "reservations"):
        if stats[what]:
            raise Violation(f"{stats[what]} {what.replace('_', ' ')} are left when everybody has gone")
    if len(node.core.announcements):
        raise Violation("announcements are left when everybody has gone")
    if any(writer != UNKNOWN for writer in node.core.deferred.writers):
        raise Violation("slots wait for writers when everybody has gone")
    if node.clients.connections or node.clients.principals:
        raise Violation("the node remembers clients that are gone")
    if node.admin.busy or node.core.pending_deletes:
        raise Violation("an administrator's work does not end")
    _tiers_are_idle(world)
    _caps_are_kept(world)


def _tiers_are_idle(world: World) -> None:
    tier_manager = world.node.tier_manager
    waits = tier_manager._promoting or len(tier_manager._promotions)
    if waits or tier_manager._held_back:
        raise Violation("something is still to be fetched when nobody asks for it")
    for state in tier_manager.states:
        if state.fetches or state.writes or state.write_back.size or state._keeping is not None or state._errands:
            raise Violation("the threads of a tier have gone, and something is still waited for")


def _caps_are_kept(world: World) -> None:
    core = world.node.core
    for tenant in {one.tenant for one in core.namespaces}:
        bounds = core.shares.bounds(tenant)
        mine = {one.number for one in core.namespaces if one.tenant == tenant}
        pinned = any(core.namespaces[number].pins.pinned for number in mine)
        if pinned or core.stats()["slots_quarantined"]:
            continue  # what is pinned stays, with its segment; and a segment with a slot that is not used any more
        held = sum(segment.size for segment in core.slots.segments if segment.namespace in mine)
        if held > bounds.cap:
            raise Violation(f"{tenant} keeps {held} bytes, its cap is {bounds.cap}")
