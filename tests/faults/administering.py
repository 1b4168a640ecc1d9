"""What an administrator does, in the middle of everything: clears, drains, resizes, warms, pins, looks."""

from __future__ import annotations

from typing import cast

from ems.pool.protocol import messages
from ems.pool.protocol.acts import Acts, CancelResize, Clear, Drain, Follow, List, Pin, Resize, Show, Warm
from tests.faults import lifecycle
from tests.faults.asking import ask, name_of, run_of
from tests.faults.settings import SEGMENT, TENANTS, Known, Violation, called
from tests.faults.world import World

Report = dict[str, object]
MOST_ROUNDS = 150
"""Two seconds each for which clearing may go on: it waits for readers, and for tiers that hang."""


def act(world: World, one: Acts, *, dry_run: bool = False) -> Report | None:
    """What an act comes to; None when it was refused."""
    done = ask(world, world.admin, messages.Administer(one, dry_run), messages.Reported)
    verb = type(one).__name__.lower()
    if done is None:
        world.counts[f"{verb} refused"] += 1
        return None
    world.counts[f"{verb}, to see what would be" if dry_run else verb] += 1
    return done.report


def _name(number: int, client: int) -> str:
    """A namespace as the administrator calls it, of a node with tenants or without."""
    tenant = (*TENANTS, "")[client % 4]
    return called(tenant, name_of(number))


def _meant(world: World, a: int, b: int) -> str:
    known = [ns.name for ns in world.node.core.namespaces]
    return known[b % len(known)] if known and a % 8 else _name(b, a)


def clear(world: World, a: int, b: int, c: int) -> None:
    """Pages are taken out: all, those of a namespace, of a tenant, or those that nobody used for long."""
    name = _meant(world, a, b)
    only = bool(c & 4)
    kinds = (
        Clear(everything=True, memory_only=only),
        Clear(namespace=name, memory_only=only),
        Clear(tenant=TENANTS[b % len(TENANTS)], memory_only=only),
        Clear(older_than=(0.0, 5.0, 100.0)[b % 3], memory_only=only),
    )
    cleared(world, kinds[c % len(kinds)], dry=a % 5 == 0, waits=a % 3 == 0)


def cleared(world: World, one: Clear, *, dry: bool = False, waits: bool = False) -> None:
    """Clear, and look whether it did what it says; who ``waits`` sees the end of what takes long."""
    before = {known: page for known, page in world.pages().items() if page.present}
    pinned = _kept_by_pins(world)
    report = act(world, one, dry_run=dry)
    rounds = 0
    while report is not None and not report["done"] and waits:
        lifecycle.work(world, 20, patient=False)
        world.let_pass(2.0)
        rounds += 1
        if rounds > MOST_ROUNDS:
            raise Violation("a pass that clears does not end")
        report = act(world, Follow(cast("int", report["job"])))
    if report is None:
        return
    after = {known for known, page in before.items() if world.pages().get(known) is page}
    if dry:
        if not rounds and after != before.keys():
            raise Violation("pages left though it was only to be said which would")
        return
    world.counts["page cleared"] += len(before) - len(after)
    if not report["done"]:
        return
    meant = {known for known in before if one.everything or known[0] == one.namespace} - pinned
    if not report["kept"] and after & meant:
        raise Violation("pages stayed that were to be cleared, and nobody reads them")
    _see_tiers(world, cast("list[Report]", report.get("tiers", [])), meant)


def _kept_by_pins(world: World) -> set[Known]:
    """The pinned pages, and those of memory that they continue."""
    kept: set[Known] = set()
    for namespace in world.node.core.namespaces:
        for key in namespace.pins.pinned:
            kept.add((namespace.name, key))
            page = namespace.index.get(key)
            while page is not None:
                kept.add((namespace.name, page.key))
                page = page.parent
    return kept


def _see_tiers(world: World, told: list[Report], meant: set[Known]) -> None:
    """What was cleared in memory is in no tier any more that could be cleared."""
    for state, tier in zip(world.node.tier_manager.states, told, strict=False):
        world.counts["page cleared in a tier"] += cast("int", tier["pages"])
        world.counts["tier could not be cleared"] += bool(tier["reason"])
        for name, key in meant - world.pages().keys():
            if not tier["reason"] and state.tier.holds(name, [key]):
                raise Violation(f"page {key.hex()} of {name} was cleared, and a tier hands it out")


def empty(world: World, a: int, b: int, c: int) -> None:
    """Tiers come to what they have to do, then pages leave memory, which is to come back from there."""
    lifecycle.work(world, 40, patient=False)
    cleared(world, Clear(everything=True, memory_only=True) if c % 2 else Clear(namespace=_meant(world, a, b)))


def drain(world: World, a: int, _b: int, _c: int) -> None:
    """Nothing more is taken in until time goes by, or it is again."""
    act(world, Drain(a % 3 > 0))


def resize(world: World, a: int, b: int, _: int) -> None:
    """The pool has more memory, or less; or what was begun is ended."""
    act(world, CancelResize() if a % 7 == 0 else Resize(SEGMENT * (a % 5 + 2)), dry_run=b % 6 == 0)


def pin(world: World, a: int, b: int, c: int) -> None:
    """Pages stay for a time."""
    name = _meant(world, a, b)
    seconds = (0.0, 1.0, 20.0, 200.0)[c % 4]
    keys = b"".join(run_of(c)[0]) if a % 2 else b""
    ns = world.node.core.find_namespace(name)
    before = dict(world.node.core.namespaces[ns].pins.pinned) if ns >= 0 else {}
    report = act(world, Pin(name, keys, seconds=seconds))
    if report is None:
        return
    pins = world.node.core.namespaces[ns].pins.pinned
    for key, until in pins.items():
        if before.get(key) != until:
            world.pinned[name, key] = until
            world.counts["page pinned"] += 1


def unpin(world: World, a: int, b: int, c: int) -> None:
    """Pages may leave again."""
    name = _meant(world, a, b)
    keys = b"".join(run_of(c)[0]) if a % 2 else b""
    if act(world, Pin(name, keys, pinned=False)) is not None:
        pins = world.node.core.namespaces[world.node.core.find_namespace(name)].pins.pinned
        for known in [one for one in world.pinned if one[0] == name and one[1] not in pins]:
            del world.pinned[known]


def warm(world: World, a: int, b: int, c: int) -> None:
    """Pages come up from a tier before anybody asks for them."""
    act(world, Warm(_meant(world, a, b), b"".join(run_of(c)[0])), dry_run=a % 5 == 0)


def look(world: World, a: int, b: int, c: int) -> None:
    """The administrator looks, which changes nothing."""
    before, busy = world.node.core.stats()["namespaces"], world.node.admin.busy
    act(world, (List(), Show(_meant(world, a, b)), Show(run_of(c)[0][-1].hex()), Follow(a % 4 + 1))[b % 4])
    if not busy and world.node.core.stats()["namespaces"] != before:
        raise Violation("a look changed what is in the pool")
