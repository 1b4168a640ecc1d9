"""What happens to tenants: quotas and keys that change, keys that end, greetings, requests that are not theirs."""

from __future__ import annotations

from ems.errors import EmsError
from ems.pool.administration.acts import Clear, Resize
from ems.pool.protocol import messages
from ems.testing.faults import laws
from ems.testing.faults.asking import seat_of
from ems.testing.faults.settings import SEGMENT, TENANTS, Violation
from ems.testing.faults.tenants import QUOTAS
from ems.testing.faults.world import World


def _obey(world: World) -> None:
    assert world.tenants is not None
    world.node._obey(world.tenants.registry)  # noqa: SLF001 - what the thread that reads the file has it do
    world.settle()
    laws.keys_are_good(world)


def set_quota(world: World, a: int, b: int, _: int) -> None:
    """A tenant has another share, which may not fit in."""
    if world.tenants is not None:
        world.tenants.set_quota(TENANTS[a % len(TENANTS)], QUOTAS[b % len(QUOTAS)])
        _obey(world)


def revoke(world: World, a: int, _b: int, _c: int) -> None:
    """A tenant's keys open nothing any more."""
    if world.tenants is not None:
        world.tenants.revoke(TENANTS[a % len(TENANTS)])
        world.counts["key revoked"] += 1
        _obey(world)


def give_key(world: World, a: int, b: int, _: int) -> None:
    """A tenant has another key, for good or for a time; its clients come back with it."""
    if world.tenants is None:
        return
    tenant = TENANTS[a % len(TENANTS)]
    world.tenants.give_key(tenant, (None, None, 60.0, 0.5)[b % 4])
    _obey(world)
    come_back(world, a, b, 0)


def come_back(world: World, _a: int, _b: int, _c: int) -> None:
    """Clients whose connections the node ended greet again."""
    for at, seat in enumerate(world.seats):
        if seat.gone:
            world.seats[at] = world.connect(at)
            world.seats[at].reading = seat.reading
            world.counts["greeted again"] += not world.seats[at].gone


def overreach(world: World, a: int, b: int, c: int) -> None:
    """A tenant asks for what is another's, or the administrator's."""
    seat = seat_of(world, a)
    if world.tenants is None or seat.gone:
        return
    others = [one.number for one in world.node.core.namespaces if one.tenant != seat.tenant]
    foreign = [
        segment.number
        for segment in world.node.core.space.segments
        if world.node.core.segment_tenant(segment.number) not in (None, seat.tenant)
    ]
    leases = list(world.node.core._leases.all)  # noqa: SLF001 - it guesses right
    requests: list[messages.Request] = [
        messages.Administer(Clear(everything=True)),
        messages.Administer(Resize(SEGMENT)),
        messages.Open(f"//{TENANTS[b % len(TENANTS)]}/small", 512),
        *[messages.Attach(number) for number in foreign],
    ]
    request = requests[b % len(requests)]
    try:
        world.node.answer(seat.owner, request)
    except EmsError:
        world.counts["a tenant was refused what is not its own"] += 1
    else:
        raise Violation(f"{seat.tenant} was served {request}")
    # What is not answered is not to have any effect: a lease of somebody else is still there.
    held = [number for number in leases if world.node.core._leases.all[number].owner != seat.owner]  # noqa: SLF001
    if held:
        world.node.answer(seat.owner, messages.Release(held[c % len(held)]))
        if held[c % len(held)] not in world.node.core._leases.all:  # noqa: SLF001
            raise Violation(f"{seat.tenant} released the lease of somebody else")
    if others:
        _look_into(world, a, others[c % len(others)])


def _look_into(world: World, a: int, number: int) -> None:
    """By the node's number for another's namespace a tenant finds its own, or nothing."""
    seat = seat_of(world, a)
    theirs = [page.key for page in world.node.core.namespaces[number].index if page.present]
    try:
        hits = world.node.answer(seat.owner, messages.Lookup(number, b"".join(theirs[:1]), lease=True))
    except EmsError:
        return
    assert isinstance(hits, messages.Hits)
    if hits.lease:
        lease = world.node.core._leases.all[hits.lease]  # noqa: SLF001
        if lease.namespace.tenant != seat.tenant:
            raise Violation(f"{seat.tenant} was promised pages of {lease.namespace.tenant}")
        world.node.answer(seat.owner, messages.Release(hits.lease))
