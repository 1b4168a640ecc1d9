"""What happens to tenants: quotas and keys that change, keys that end, greetings, requests that are not theirs."""

from __future__ import annotations

from ems.errors import EmsError
from ems.pool.protocol import messages
from ems.pool.protocol.acts import Clear, Resize
from tests.faults import invariants
from tests.faults.asking import seat_of
from tests.faults.settings import SEGMENT, TENANTS, Violation
from tests.faults.tenants import QUOTAS
from tests.faults.world import World


def _obey(world: World) -> None:
    assert world.tenants is not None
    world.node._obey(world.tenants.registry)
    world.settle()
    invariants.keys_are_good(world)


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
    for at, client in enumerate(world.clients):
        if client.gone:
            world.clients[at] = world.connect(at)
            world.clients[at].reading = client.reading
            world.counts["greeted again"] += not world.clients[at].gone


def overreach(world: World, a: int, b: int, c: int) -> None:
    """A tenant asks for what is another's, or the administrator's."""
    client = seat_of(world, a)
    if world.tenants is None or client.gone:
        return
    others = [one.number for one in world.node.core.namespaces if one.tenant != client.tenant]
    foreign = [
        segment.number
        for segment in world.node.core.slots.segments
        if world.node.core.segment_tenant(segment.number) not in (None, client.tenant)
    ]
    leases = list(world.node.core.leases.all)
    requests: list[messages.Request] = [
        messages.Administer(Clear(everything=True)),
        messages.Administer(Resize(SEGMENT)),
        messages.Open(f"//{TENANTS[b % len(TENANTS)]}/small", 512),
        *[messages.Attach(number) for number in foreign],
    ]
    request = requests[b % len(requests)]
    try:
        world.node.answer(client.client_id, request)
    except EmsError:
        world.counts["a tenant was refused what is not its own"] += 1
    else:
        raise Violation(f"{client.tenant} was served {request}")
    # What is not answered is not to have any effect: a lease of somebody else is still there.
    held = [number for number in leases if world.node.core.leases.all[number].client_id != client.client_id]
    if held:
        world.node.answer(client.client_id, messages.Release(held[c % len(held)]))
        if held[c % len(held)] not in world.node.core.leases.all:
            raise Violation(f"{client.tenant} released the lease of somebody else")
    if others:
        _look_into(world, a, others[c % len(others)])


def _look_into(world: World, a: int, number: int) -> None:
    """By the node's number for another's namespace a tenant finds its own, or nothing."""
    client = seat_of(world, a)
    theirs = [page.key for page in world.node.core.namespaces[number].index if page.present]
    try:
        hits = world.node.answer(client.client_id, messages.Lookup(number, b"".join(theirs[:1]), lease=True))
    except EmsError:
        return
    assert isinstance(hits, messages.Hits)
    if hits.lease:
        lease = world.node.core.leases.all[hits.lease]
        if lease.namespace.tenant != client.tenant:
            raise Violation(f"{client.tenant} was promised pages of {lease.namespace.tenant}")
        world.node.answer(client.client_id, messages.Release(hits.lease))
