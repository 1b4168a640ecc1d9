"""What does not hold in the brain of a pool, one sentence each; nothing when all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import chain

from ems.pool.core.index import Index
from ems.pool.core.leases import Leases
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.pins import Announcements, PinSet
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.reservations import Reservations
from ems.pool.core.slot_allocator import _SLOT_BITS, _SLOT_MASK, SlotAllocator
from ems.pool.layout import REF_BYTES
from ems.pool.pages import Page


def wrong_slots(slots: SlotAllocator) -> list[str]:
    broken = []
    if slots.total != sum(segment.size for segment in slots.segments):
        broken.append("the bytes of the pool are miscounted")
    seen: set[int] = set()
    free_in: dict[int, int] = {}
    for namespace, stack in slots._free.items():
        for entry in stack:
            number = entry >> _SLOT_BITS
            if entry in seen:
                broken.append(f"slot {entry & _SLOT_MASK} of segment {number} is free twice")
            seen.add(entry)
            free_in[number] = free_in.get(number, 0) + 1
            if slots.segments[number].namespace != namespace:
                broken.append(f"segment {number} has free slots in namespace {namespace} that does not own it")
    broken += [
        f"segment {segment.number} lost slots: {segment.used} used of {segment.offered}"
        for segment in slots.segments
        if free_in.get(segment.number, 0) + segment.used != segment.offered
    ]
    for namespace in slots._free:
        own = [segment for segment in slots.segments if segment.namespace == namespace]
        if slots._offered[namespace] != sum(segment.offered for segment in own):
            broken.append(f"namespace {namespace} miscounts the slots that it was offered")
        if slots._carved[namespace] != sum(
            segment.geometry.slot_count for segment in own if segment.geometry and not segment.closing
        ):
            broken.append(f"namespace {namespace} miscounts its slots")
    return broken


def wrong_announcements(announcements: Announcements) -> list[str]:
    while announcements._unsettled:
        announcements.settle_some()
    broken = []
    awaited: dict[int, Counter[bytes]] = {}
    pins: dict[int, PinSet] = {}
    for held in announcements._all.values():
        pins[id(held.pins)] = held.pins
        awaited.setdefault(id(held.pins), Counter()).update(held.keys)
    broken += [
        "a key is awaited by another number of announcements than there are"
        for one in pins
        if pins[one].awaited != awaited[one]
    ]
    weights: Counter[int | str | None] = Counter()
    for held in announcements._all.values():
        for name in (held.client_id, held.pins.tenant, None):
            weights[name] += held.weight
    if weights != announcements._weight:
        broken.append("the keys of announcements are miscounted")
    if list(announcements._all) != list(announcements._of.get(None, ())):
        broken.append("an announcement belongs to nobody")
    return broken


def wrong_leases(leases: Leases, namespaces: Iterable[NamespacePages]) -> list[str]:
    promised: Counter[int] = Counter()
    broken = []
    for lease in leases.all.values():
        for page in leases._promised(lease):
            promised[id(page)] += 1
            if lease.namespace.index.get(page.key) is not page:
                broken.append(f"leased page {page.key.hex()} is no longer in the pool")
    broken += [
        f"page {page.key.hex()} counts {page.leases} leases, expected {promised[id(page)]}"
        for namespace in namespaces
        for page in namespace.index
        if page.leases != promised[id(page)]
    ]
    return broken


def wrong_reservations(reservations: Reservations, namespaces: Iterable[NamespacePages]) -> list[str]:
    waiting = sum(len(held.waiting) for held in reservations.all.values())
    if waiting != sum(namespace.writing for namespace in namespaces):
        return ["a page is being written that no reservation holds"]
    counted: Counter[Hashable] = Counter()
    for held in reservations.all.values():
        if held.process is not None and held.waiting:
            counted[held.process] += len(held.waiting) * held.namespace.page_size
    if counted != reservations.by_process or counted.total() != reservations.by_tenant.total():
        return ["bytes that are to be written are miscounted"]
    return []


def wrong_index(index: Index) -> list[str]:
    known = {id(page): page for page in chain(index.pages.values(), index._missing.values())}
    children: dict[int, set[Page]] = {}
    for page in known.values():
        if page.parent is not None:
            children.setdefault(id(page.parent), set()).add(page)
    broken = [
        f"page {page.key.hex()} has {len(page.children())} suffixes, expected {len(children.get(number, ()))}"
        for number, page in known.items()
        if set(page.children()) != children.get(number, set())
    ]
    broken += [
        f"the prefix of page {page.key.hex()} left before it"
        for page in known.values()
        if page.parent is not None and id(page.parent) not in known
    ]
    broken += [
        f"missing page {page.key.hex()} is nobody's prefix"
        for page in index._missing.values()
        if page.suffixes is None or page.present
    ]
    broken += [
        f"tail {page.key.hex()} is listed and not here"
        for listed in index._tails.values()
        for page in listed
        if index.pages.get(page.key) is not page or page.tail is None
    ]
    broken += [f"page {key.hex()} is both here and missing" for key in index.pages.keys() & index._missing.keys()]
    listed = {id(page) for page in index.policy}
    if listed != {id(page) for page in index if page.present} or len(listed) != len(index.policy):
        broken.append("the pages that the policy orders are not the present pages")
    return broken


def wrong_core(core: PoolCore) -> list[str]:
    broken = wrong_slots(core.slots) + wrong_announcements(core.announcements)
    broken += wrong_leases(core.leases, core.namespaces) + wrong_reservations(core.reservations, core.namespaces)
    used = core.deferred.resting + core.deferred.quarantined
    for namespace in core.namespaces:
        used += len(namespace.index)
        broken += _wrong_pages(namespace)
    if used != sum(segment.used for segment in core.slots.segments):
        broken.append(f"{used} pages are known but other slots are out")
    return broken


def _wrong_pages(namespace: NamespacePages) -> list[str]:
    broken = wrong_index(namespace.index)
    present = sum(page.present for page in namespace.index)
    if present + namespace.writing != len(namespace.index):
        broken.append(f"namespace {namespace.name} does not account for all of its pages")
    broken += [f"page {page.key.hex()} lies nowhere" for page in namespace.index if len(page.ref) != REF_BYTES]
    return broken
