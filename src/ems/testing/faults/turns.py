"""How clients and nodes come and go, and what time and memory do meanwhile."""

from __future__ import annotations

from ems.pool.administration.acts import Drain
from ems.pool.core.rest import LIMBO_SECONDS
from ems.testing.faults import administering, laws, lives
from ems.testing.faults.seats import GONE
from ems.testing.faults.settings import SEGMENTS
from ems.testing.faults.world import World


def leave(world: World, a: int, b: int, _: int) -> None:
    """A client's connection ends; its process may live and go on writing for a while."""
    at = a % len(world.seats)
    seat = world.seats[at]
    if b % 2:
        seat.pid = GONE
        seat.writing.clear()
    else:
        world.cut_off(seat)
    seat.close(None)
    world.node.answered()
    world.seats[at] = world.connect(at)
    world.seats[at].reading = [one for one in seat.reading if b % 2 == 0]
    for reading in world.seats[at].reading:
        reading.leased = False


def die(world: World, a: int, _b: int, _c: int) -> None:
    """The process of a writer that was cut off ends."""
    owners = sorted(world.node._resting)  # noqa: SLF001 - what the process table would say
    if owners:
        owner = owners[a % len(owners)]
        world.late = [late for late in world.late if late.owner != owner]
        world.node._resting[owner] = GONE  # noqa: SLF001
        world.tick()


def tick(world: World, a: int, b: int, _c: int) -> None:
    """Time goes by, in which tiers do what they have to, or do not come to it."""
    if b % 2 and world.below.places:
        lives.work(world, 40, patient=False)
    world.let_pass((0.5, 5.0, 11.0, LIMBO_SECONDS, 130.0)[a % 5])
    if world.node.core.draining:
        administering.act(world, Drain(False))
    world.tick()
    laws.keys_are_good(world)
    laws.nothing_hangs(world)


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
        world.late = [late for late in world.late if late.until > world.now]
    world.tick()
    laws.keys_are_good(world)
    for late in world.late:
        late.until = min(late.until, world.now + LIMBO_SECONDS)


def crash(world: World, _a: int, _b: int, _c: int) -> None:
    """The node is killed between two requests."""
    lives.crashed(world)


def arm(world: World, a: int, b: int, _: int) -> None:
    """The node will be killed at one of its next writes, in the middle of it or before."""
    world.points.arm(a % 12, (b % 5) / 4)


def stop(world: World, a: int, _b: int, _c: int) -> None:
    """A clean stop, and a start that may have more or less memory."""
    lives.stopped(world, max(SEGMENTS + (0, 0, 0, 1, -1)[a % 5], 1))


def hand_over(world: World, a: int, _b: int, _c: int) -> None:
    """Another process becomes the node, or does not come so far."""
    lives.handed_over(world, a % 6)


def fill_memory(world: World, _a: int, _b: int, _c: int) -> None:
    """Memory has no room for files, or has again."""
    world.points.full = not world.points.full
