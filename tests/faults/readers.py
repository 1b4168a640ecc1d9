"""What readers do: they look up, copy and verify as loaders do, report what was wrong, and let go."""

from __future__ import annotations

from ems.pool.layout import PageRef, unpack_refs
from ems.pool.names import own_name
from ems.pool.protocol import messages
from ems.pool.segments.reader import PageReader, Trust, Verify
from tests.faults.asking import PATHS, ask, name_of, opened_namespace, run_of, seat_of, tell
from tests.faults.settings import Violation, block_key, called, content, size_of
from tests.faults.simulated_clients import Reading, SimulatedClient
from tests.faults.world import World


def lookup(world: World, a: int, b: int, c: int) -> None:
    """A client is promised pages."""
    looked_up(world, a, b, c)


def looked_up(world: World, a: int, b: int, c: int) -> Reading | None:
    client, name = seat_of(world, a), name_of(b)
    path, tail = PATHS[c % len(PATHS)], None
    if b % 4 and world.committed:
        name, key = sorted(world.committed)[c % len(world.committed)]
        name = own_name(name)
        path, tail = world.meaning[key]
    number = opened_namespace(world, client, name)
    if number is None:
        return None
    keys = [block_key(path[: end + 1]) for end in range(len(path))]
    if tail is not None:
        request = messages.Lookup(number, b"", True, tail)
    else:
        request = messages.Lookup(number, b"".join(keys), True)
    hits = ask(world, client, request, messages.Hits)
    if hits is None or not hits.lease:
        return None
    refs = unpack_refs(hits.refs)
    found = [hits.key] if hits.key else keys[: len(refs)]
    trust = Trust(world.verify, world.node.trusted_from)
    world.map(client, refs)
    inner = called(client.tenant, name)
    reader = PageReader(client.maps.segment, inner, size_of(inner), trust, c)
    reading = Reading(hits.lease, inner, found, refs, reader, world.life)
    client.reading.append(reading)
    world.node.answered()
    return reading


def copied(world: World, reading: Reading) -> bool:
    at = len(reading.copies)
    if at == len(reading.refs) or at > reading.accepted:
        return False
    key, ref = reading.keys[at], reading.refs[at]
    pages = reading.reader.look(ref.pack(), key)
    if not pages.present:
        reading.reader.corrupt.pop()  # promised in an earlier life of the node, perhaps
        return False
    reading.looked.append(pages)
    reading.copies.append(bytes(reading.reader.page(ref)))
    world.counts["page copied"] += 1
    return True


def verified(world: World, reading: Reading) -> bool:
    at = reading.accepted
    if at >= len(reading.copies):
        return False
    key, ref = reading.keys[at], reading.refs[at]
    reader, pages = reading.reader, reading.looked[at]
    if not reader.same(pages, 0, reader.sound(pages, 0, 1)):
        world.counts["page rejected"] += 1
        return False
    reading.accepted += 1
    world.counts["page accepted"] += 1
    if reading.copies[at] != content(reading.name, key):
        wrong(world, reading, ref)
    return True


def wrong(world: World, reading: Reading, ref: PageRef) -> None:
    """A wrong byte: only of a damaged page whose writer gave no checksum, or where checks were asked to be rare."""
    hurt_in = world.hurt.get(ref[:3])
    if hurt_in is not None and world.verify is not Verify.ALWAYS and hurt_in >= reading.life:
        world.counts["damaged page not sampled"] += 1
        return
    if hurt_in is not None and ref[:3] in world.unsummed:
        world.counts["damaged page without checksum"] += 1
        return
    raise Violation(f"a wrong byte was served, of page {reading.keys[reading.accepted - 1].hex()} of {reading.name}")


def copy(world: World, a: int, b: int, _: int) -> None:
    """A reader copies its next page."""
    client = seat_of(world, a)
    if client.reading:
        copied(world, client.reading[b % len(client.reading)])


def verify(world: World, a: int, b: int, _: int) -> None:
    """A reader looks whether what it copied was right."""
    client = seat_of(world, a)
    if client.reading:
        verified(world, client.reading[b % len(client.reading)])


def finish(world: World, a: int, b: int, _: int) -> None:
    """A reader copies the rest, reports what was wrong and lets go."""
    client = seat_of(world, a)
    if client.reading:
        finished(world, client, client.reading[b % len(client.reading)])


def finished(world: World, client: SimulatedClient, reading: Reading) -> None:
    while verified(world, reading) or copied(world, reading):
        pass
    client.reading.remove(reading)
    for key, ref in reading.reader.corrupt:
        world.counts["mismatch found"] += 1
        if ref[:3] not in world.hurt and ref[:2] not in world.hurt_headers:
            raise Violation(f"page {key.hex()} of {reading.name} does not match its checksum, and nobody damaged it")
    if reading.life != world.life or not reading.leased:
        return
    number = opened_namespace(world, client, own_name(reading.name))
    if number is not None and reading.reader.corrupt:
        keys = b"".join(key for key, _ in reading.reader.corrupt)
        refs = b"".join(ref.pack() for _, ref in reading.reader.corrupt)
        done = ask(world, client, messages.Corrupt(number, keys, refs), messages.Done)
        world.counts["page quarantined"] += done.count if done is not None else 0
    tell(world, client, messages.Release(reading.number))
    world.node.answered()


def load(world: World, a: int, b: int, c: int) -> None:
    """Look up, copy, verify, release."""
    reading = looked_up(world, a, b, c)
    if reading is not None:
        finished(world, seat_of(world, a), reading)


def announce(world: World, a: int, b: int, c: int) -> None:
    """A request waits, or waits no longer."""
    client, name = seat_of(world, a), name_of(b)
    if client.announced and c % 2:
        tell(world, client, messages.Withdraw(client.announced.pop()))
        return
    number = opened_namespace(world, client, name)
    if number is not None:
        told = ask(world, client, messages.Announce(number, b"".join(run_of(c)[0])), messages.Announced)
        if told is not None:
            client.announced.append(told.announcement)
