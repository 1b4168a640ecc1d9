"""What writers do: they reserve, copy (whole, in part, or when they should not any more), publish, give up."""

from __future__ import annotations

from ems.pool.layout import crc32c, unpack_refs
from ems.pool.protocol import messages
from tests.faults import lifecycle
from tests.faults.asking import PATHS, ask, name_of, opened_namespace, run_of, seat_of
from tests.faults.settings import called, content
from tests.faults.simulated_clients import Late, SimulatedClient, Writing
from tests.faults.world import World


def reserve(world: World, a: int, b: int, c: int) -> None:
    """A client is promised slots."""
    reserved(world, a, b, c)


def reserved(world: World, a: int, b: int, c: int) -> Writing | None:
    client, name = seat_of(world, a), name_of(b)
    number = opened_namespace(world, client, name)
    if number is None:
        return None
    keys, parent, tail = run_of(c)
    for key in keys:
        world.meaning[key] = (PATHS[c % len(PATHS)], tail if tail is not None and key == tail.key else None)
    tails = None if tail is None else {len(keys) - 1: tail}
    request = messages.Reserve(number, parent, b"".join(keys), tails)
    granted = ask(world, client, request, messages.Granted)
    if granted is None:
        return None
    refs = iter(unpack_refs(granted.refs))
    places = {at: next(refs) for at, outcome in enumerate(granted.outcomes) if outcome == 0}
    world.node.answered()
    if not places:
        return None
    world.map(client, list(places.values()))
    files = {ref.segment: client.maps.file(ref.segment) for ref in places.values()}
    writing = Writing(granted.reservation, called(client.tenant, name), keys, places, client.maps, files)
    client.writing.append(writing)
    return writing


def fill(writing: Writing, at: int, part: float = 1.0) -> None:
    data = content(writing.name, writing.keys[at])
    if writing.maps.write(writing.granted[at], data[: int(len(data) * part)], len(data)) and part == 1.0:
        writing.written.add(at)


def write(world: World, a: int, b: int, c: int) -> None:
    """A writer copies one page, or a part of it."""
    client = seat_of(world, a)
    if client.writing:
        writing = client.writing[b % len(client.writing)]
        missing = sorted(writing.granted.keys() - writing.written)
        if missing:
            fill(writing, missing[c % len(missing)], 0.5 if c % 3 == 0 else 1.0)


def commit(world: World, a: int, b: int, c: int) -> None:
    """A writer completes pages and publishes all of them, or some."""
    client = seat_of(world, a)
    if client.writing:
        committed(world, client, b % len(client.writing), part=c % 3 == 0, checksums=c % 8 != 1)


def committed(
    world: World, client: SimulatedClient, number: int, *, part: bool = False, checksums: bool = True
) -> None:
    writing = client.writing.pop(number)
    positions = sorted(writing.granted)
    if part:
        positions = positions[: len(positions) // 2 + 1]
    for at in positions:
        if at not in writing.written:
            fill(writing, at)
    positions = [at for at in positions if at in writing.written]
    if not positions:  # its slots are not what was promised any more
        ask(world, client, messages.Abort(writing.number), messages.Done)
        world.node.answered()
        return
    world.ever.update((writing.name, writing.keys[at]) for at in positions)
    sums = b""
    if checksums or not world.settings.checksums_optional:
        told = [crc32c(memoryview(content(writing.name, writing.keys[at]))) for at in positions]
        sums = b"".join(one.to_bytes(4, "little") for one in told)
    done = ask(world, client, messages.Commit(writing.number, positions, sums), messages.Done)
    if done is None:
        return
    for at in positions:
        ref = writing.granted.pop(at)
        (world.tails_lost.add if world.points.full else world.tails_lost.discard)((writing.name, writing.keys[at]))
        world.committed[writing.name, writing.keys[at]] = ref.pack()
        world.hurt_headers.discard(ref[:2])
        if not sums:
            world.unsummed.add(ref[:3])
            world.never_summed.add((writing.name, writing.keys[at]))
    if writing.granted:
        client.writing.append(writing)
    world.node.answered()


def save(world: World, a: int, b: int, c: int) -> None:
    """Reserve, write and commit."""
    writing = reserved(world, a, b, c)
    if writing is not None:
        client = seat_of(world, a)
        committed(world, client, client.writing.index(writing))


def crowd(world: World, a: int, _b: int, c: int) -> None:
    """Others are writing into what a namespace does not have; requests wait for all that it has, and more is saved."""
    small, large, other = 0, 3, 4
    for name in (small, other):
        reserved(world, a + 1, name, c)
    client, chains = seat_of(world, a), [PATHS.index(path) + len(PATHS) * 12 for path in ("abcd", "abxy", "klm", "qr")]
    for chain in chains[:-1]:
        save(world, a, large, chain)
        number = opened_namespace(world, client, name_of(large))
        if number is None:
            return
        told = ask(world, client, messages.Announce(number, b"".join(run_of(chain)[0])), messages.Announced)
        if told is not None:
            client.announced.append(told.announcement)
    world.tick()
    save(world, a, large, chains[-1])


def abort(world: World, a: int, b: int, _: int) -> None:
    """A writer gives up."""
    client = seat_of(world, a)
    if client.writing:
        writing = client.writing.pop(b % len(client.writing))
        ask(world, client, messages.Abort(writing.number), messages.Done)
        world.node.answered()


def write_late(world: World, a: int, b: int, c: int) -> None:
    """A writer that was cut off goes on writing, wildly."""
    if world.late:
        one = world.late[a % len(world.late)]
        _write_wildly(world, one, b, c)


def _write_wildly(world: World, one: Late, b: int, c: int) -> None:
    if one.loose:
        segment = world.node.core.slots.segments[one.ref.segment]
        for slot, generation in enumerate(segment.generations):
            world.hurt[one.ref.segment, slot, generation] = world.life
    one.maps.write(one.ref, bytes([b % 256, c % 256]) * (one.size // 2), one.size)
    world.counts["late write"] += 1


def stop_writing(world: World, a: int, b: int, _: int) -> None:
    """A writer that was cut off says on another connection into which slots it still writes."""
    client = seat_of(world, a)
    mine = [one for one in world.late if one.writer == client.writer]
    if mine:
        still = mine[: b % len(mine)]
        refs = [one.ref for one in still] + [ref for one in client.writing for ref in one.granted.values()]
        world.late = [one for one in world.late if one.writer != client.writer or one in still]
        told = messages.StillWriting(b"".join(ref.pack() for ref in refs))
        if ask(world, client, told, messages.Done) is None:
            world.late += [one for one in mine if one not in still]
        else:
            world.counts["a writer said where it stopped"] += 1
        world.node.answered()


def slow_writer(world: World, a: int, b: int, c: int) -> None:
    """The node is killed, or a connection ends; minutes later others fill the pool, and who was cut off copies."""
    writing = reserved(world, a, b, c)
    if writing is None:
        return
    client = seat_of(world, a)
    if c % 2:
        lifecycle.crashed(world)
    else:
        world.cut_off(client)
        client.close(None)
        world.clients[a % len(world.clients)] = world.connect(a % len(world.clients))
    world.let_pass((5.0, 34.0, 600.0)[b % 3])
    for path in range(len(PATHS)):
        save(world, a + 1, b, path)
    for one in [one for one in world.late if one.writer == client.writer]:
        _write_wildly(world, one, b, c)
        world.counts["slow writer"] += 1
