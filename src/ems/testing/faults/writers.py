"""What writers do: they reserve, copy (whole, in part, or when they should not any more), publish, give up."""

from __future__ import annotations

from ems.pool.checksum import page_checksum
from ems.pool.protocol import messages
from ems.pool.segments.layout import unpack_refs
from ems.testing.faults.asking import PATHS, ask, name_of, opened_namespace, run_of, seat_of
from ems.testing.faults.seats import Seat, Writing
from ems.testing.faults.settings import called, content
from ems.testing.faults.world import World


def reserve(world: World, a: int, b: int, c: int) -> None:
    """A client is promised slots."""
    reserved(world, a, b, c)


def reserved(world: World, a: int, b: int, c: int) -> Writing | None:
    seat, name = seat_of(world, a), name_of(b)
    number = opened_namespace(world, seat, name)
    if number is None:
        return None
    keys, parent, tail = run_of(c)
    for key in keys:
        world.meaning[key] = (PATHS[c % len(PATHS)], tail if tail is not None and key == tail.key else None)
    granted = ask(world, seat, messages.Reserve(number, parent, b"".join(keys), tail), messages.Granted)
    if granted is None:
        return None
    refs = iter(unpack_refs(granted.refs))
    places = {at: next(refs) for at, outcome in enumerate(granted.outcomes) if outcome == 0}
    world.node.answered()
    if not places:
        return None
    world.map(seat, list(places.values()))
    writing = Writing(granted.reservation, called(seat.tenant, name), keys, places, seat.maps)
    seat.writing.append(writing)
    return writing


def fill(writing: Writing, at: int, part: float = 1.0) -> None:
    data = content(writing.name, writing.keys[at])
    writing.maps.write(writing.granted[at], data[: int(len(data) * part)])
    if part == 1.0:
        writing.written.add(at)


def write(world: World, a: int, b: int, c: int) -> None:
    """A writer copies one page, or a part of it."""
    seat = seat_of(world, a)
    if seat.writing:
        writing = seat.writing[b % len(seat.writing)]
        missing = sorted(writing.granted.keys() - writing.written)
        if missing:
            fill(writing, missing[c % len(missing)], 0.5 if c % 3 == 0 else 1.0)


def commit(world: World, a: int, b: int, c: int) -> None:
    """A writer completes pages and publishes all of them, or some."""
    seat = seat_of(world, a)
    if seat.writing:
        committed(world, seat, b % len(seat.writing), part=c % 3 == 0, checksums=c % 8 != 1)


def committed(world: World, seat: Seat, number: int, *, part: bool = False, checksums: bool = True) -> None:
    writing = seat.writing.pop(number)
    positions = sorted(writing.granted)
    if part:
        positions = positions[: len(positions) // 2 + 1]
    for at in positions:
        if at not in writing.written:
            fill(writing, at)
    world.ever.update((writing.name, writing.keys[at]) for at in positions)
    sums = b""
    if checksums or not world.settings.checksums_optional:
        told = [page_checksum(memoryview(content(writing.name, writing.keys[at]))) for at in positions]
        sums = b"".join(one.to_bytes(4, "little") for one in told)
    done = ask(world, seat, messages.Commit(writing.number, positions, sums), messages.Done)
    if done is None:
        return
    for at in positions:
        ref = writing.granted.pop(at)
        (world.tails_lost.add if world.points.full else world.tails_lost.discard)(writing.keys[at])
        world.committed[writing.name, writing.keys[at]] = ref.pack()
        world.hurt_headers.discard(ref[:2])
        if not sums:
            world.unsummed.add(ref[:3])
            world.never_summed.add((writing.name, writing.keys[at]))
    if writing.granted:
        seat.writing.append(writing)
    world.node.answered()


def save(world: World, a: int, b: int, c: int) -> None:
    """Reserve, write and commit."""
    writing = reserved(world, a, b, c)
    if writing is not None:
        seat = seat_of(world, a)
        committed(world, seat, seat.writing.index(writing))


def abort(world: World, a: int, b: int, _: int) -> None:
    """A writer gives up."""
    seat = seat_of(world, a)
    if seat.writing:
        writing = seat.writing.pop(b % len(seat.writing))
        ask(world, seat, messages.Abort(writing.number), messages.Done)
        world.node.answered()


def write_late(world: World, a: int, b: int, c: int) -> None:
    """A writer that was cut off goes on writing, wildly."""
    late = [one for one in world.late if one.until > world.now]
    if late:
        one = late[a % len(late)]
        if one.loose:
            segment = world.node.core._space.segments[one.ref.segment]  # noqa: SLF001
            for slot, generation in enumerate(segment.generations):
                world.hurt[one.ref.segment, slot, generation] = world.life
        one.maps.write(one.ref, bytes([b % 256, c % 256]) * (one.size // 2))
        world.counts["late write"] += 1
