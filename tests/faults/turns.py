"""How clients and nodes come and go, and what time and memory do meanwhile."""

from __future__ import annotations

from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.protocol.acts import Drain
from tests.faults import administering, invariants, lifecycle
from tests.faults.settings import SEGMENTS
from tests.faults.world import World


def leave(world: World, a: int, b: int, _: int) -> None:
    """A client's connection ends; its process may live and go on writing, whoever is in its place then."""
    at = a % len(world.clients)
    client = world.clients[at]
    if b % 2:
        world.ends(client.writer)
        client.writing.clear()
    else:
        world.cut_off(client)
        if b % 4:
            world.processes[at] = world.born()
    client.close(None)
    world.node.answered()
    world.clients[at] = world.connect(at)
    world.clients[at].reading = [one for one in client.reading if b % 2 == 0]
    for reading in world.clients[at].reading:
        reading.leased = False


def die(world: World, a: int, _b: int, _c: int) -> None:
    """The process of a writer that was cut off ends."""
    orphans = sorted({late.writer for late in world.late} - set(world.processes))
    if orphans:
        world.ends(orphans[a % len(orphans)])
        world.tick()


def tick(world: World, a: int, b: int, _c: int) -> None:
    """Time goes by, in which tiers do what they have to, or do not come to it."""
    if b % 2 and world.below.places:
        lifecycle.work(world, 40, patient=False)
    world.let_pass((0.5, 5.0, 11.0, REPLACE_SECONDS, 130.0)[a % 5])
    if world.node.core.draining:
        administering.act(world, Drain(False))
    world.tick()
    invariants.keys_are_good(world)
    invariants.nothing_hangs(world)


def jump(world: World, a: int, _b: int, _c: int) -> None:
    """A clock jumps: that on the wall as anybody sets it, that of the host a day ahead, which is a day for everybody.

    The host's goes back only where there are no tiers: it cannot, and all that was proven against it is kept.
    """
    if a % 3 == 0:
        world.times.date += (-1e6, -3600.0, 7200.0, 1e8)[a // 3 % 4]
        world.counts["the wall's clock was set"] += 1
    elif a % 3 == 1 and not world.below.places:
        world.times.ahead -= (1.0, 40.0, 1e6)[a // 3 % 3]
    else:
        world.times.ahead += 86400.0
    world.tick()
    invariants.keys_are_good(world)


def crash(world: World, _a: int, _b: int, _c: int) -> None:
    """The node is killed between two requests."""
    lifecycle.crashed(world)


def arm(world: World, a: int, b: int, _: int) -> None:
    """The node will be killed at one of its next writes, in the middle of it or before."""
    world.points.arm(a % 12, (b % 5) / 4)


def stop(world: World, a: int, _b: int, _c: int) -> None:
    """A clean stop, and a start that may have more or less memory."""
    lifecycle.stopped(world, max(SEGMENTS + (0, 0, 0, 1, -1)[a % 5], 1))


def restart(world: World, _a: int, _b: int, _c: int) -> None:
    """The node becomes another release in its own process."""
    lifecycle.restarted(world)


def fill_memory(world: World, _a: int, _b: int, _c: int) -> None:
    """Memory has no room for files, or has again."""
    world.points.full = not world.points.full
