"""How nodes come and go: begun, killed, stopped, handed over, and what must be there after each of that."""

from __future__ import annotations

import os
from typing import cast

import msgspec

from ems.config import NodeConfig
from ems.errors import ConfigError
from ems.pool.core.handover import HandOver
from ems.pool.core.rest import LIMBO_SECONDS
from ems.pool.node.connection import Connection
from ems.pool.node.listener import Listener
from ems.pool.node.succession import Inheritance
from ems.pool.segments.layout import PageRef
from ems.pool.segments.tail_file import Listed
from ems.pool.tiers.carrier import FLUSH_SECONDS
from ems.testing.faults import laws
from ems.testing.faults.node import HistoryNode
from ems.testing.faults.points import Crash
from ems.testing.faults.seats import GONE, Heir
from ems.testing.faults.settings import SEGMENTS, Violation
from ems.testing.faults.world import Former, World


def _made(world: World, inheritance: Heir | None = None) -> HistoryNode:
    async def make() -> HistoryNode:
        config = world.config() if inheritance is None else cast("HandOver", inheritance.state).config
        if not isinstance(config, NodeConfig):
            config = msgspec.convert(config, NodeConfig, dec_hook=lambda kind, value: kind(value))
        given = cast("Inheritance | None", inheritance)
        return HistoryNode(config, world.times, world.points, world.below, world, given)

    return world.loop.run_until_complete(make())


def begin(world: World) -> None:
    """A node on what is there, for which time goes by from now on."""
    _begin(world)
    _go(world)


def _begin(world: World) -> None:
    """A node on what is there; where it cannot start it is started again, without what hindered it."""
    world.new_loop()
    while True:
        world.points.dead = False
        try:
            node = _made(world)
        except Crash:
            world.counts["ended while it started"] += 1
            continue
        except ConfigError:
            world.counts["could not start"] += 1
            world.points.full = False
            continue
        break
    node._listener = Listener(node.config.socket)  # noqa: SLF001 - a node that listens has a thread of its own
    for number, size in enumerate(node.arena.sizes):
        os.posix_fallocate(node.arena.descriptor(number), 0, size)
        node.arena.touched[number] = size
        node.core.touched(number, size)
    node.core.touching_ended()
    world.life += 1
    world.node = node
    world.connect_all()


def _go(world: World) -> None:
    """From now on time goes by for the node."""
    node = world.node
    node._steward.audit = None  # noqa: SLF001 - it writes on a thread of its own
    node.arena._tails._compact_above = 300  # noqa: SLF001 - so that it is written anew in short histories
    node.carrier.start()
    node._tick()  # noqa: SLF001


def crashed(world: World) -> None:
    """The node was killed: begin again on what is there, and look that it is what it must be."""
    world.points.dead = True
    world.counts["crash"] += 1
    dead = world.node
    world.remember(dead)
    dead.workers.kill()
    dead.carrier.leave()
    dead._connections.clear()  # noqa: SLF001
    dead.arena.leave()
    assert dead._listener is not None  # noqa: SLF001
    dead._listener.leave()  # noqa: SLF001
    _begin_again(world, dead)


def stopped(world: World, segments: int = SEGMENTS) -> None:
    """A clean stop, and a start with another number of segments."""
    node = world.node
    world.account()
    tails = _tails_of(world, node)
    begun = world.times.passed
    node.close()
    if world.times.passed - begun > FLUSH_SECONDS + 0.1:
        raise Violation(f"a node took {world.times.passed - begun:.1f} s to stop")
    world.surprises.clear()
    if world.points.dead:
        raise Crash
    world.counts["stop"] += 1
    world.remember(node)
    node.workers.kill()
    _begin_again(world, node, segments, tails)


def _begin_again(
    world: World,
    dead: HistoryNode,
    segments: int = SEGMENTS,
    tails: set[Listed] | None = None,
) -> None:
    must = {
        (namespace.name, page.key): page.ref
        for namespace in dead.core.namespaces
        for page in namespace.index
        if page.present and world.committed.get((namespace.name, page.key)) == page.ref
    }
    listed = {one for one in (tails or _tails_of(world, dead)) if one[:2] in must}
    # Those that handed over before end sooner than slots rest: who begins anew does not know of them.
    for former in world.former:
        former.node.workers.kill()
    world.former.clear()
    for seat in world.seats:
        world.cut_off(seat)
    for late in world.late:
        late.until = min(late.until, world.now + LIMBO_SECONDS)
    smaller = min(segments, world.sizes)
    world.sizes = segments
    world.pinned.clear()
    _begin(world)
    node = world.node
    found = {known: page for known, page in world.pages().items() if page.present}
    for known in found:
        if known not in world.ever:
            raise Violation(f"page {known[1].hex()} of {known[0]} is back, which nobody committed")
    for known, packed in must.items():
        ref = PageRef.unpack(packed)
        excused = ref.segment >= smaller or ref[:2] in world.hurt_headers or ref.segment in world.hurt_segments
        if known not in found and not excused:
            raise Violation(f"the committed page {known[1].hex()} of {known[0]} was lost with its node")
    world.counts["page back after a restart"] += len(found)
    world.committed = {known: page.ref for known, page in found.items()}
    lost = {one for one in listed if one[:2] in found and one[1] not in world.tails_lost} - _tails_of(world, node)
    if lost and not world.tails_hurt:
        raise Violation(f"{len(lost)} of {len(listed)} tails were lost with their node")
    world.tails_hurt = False
    world.hurt_headers.clear()
    world.hurt_segments.clear()
    laws.headers_agree(world)
    _go(world)


def _tails_of(world: World, node: HistoryNode) -> set[Listed]:
    return {one for one in node.core.tails() if one[:2] in world.committed}


def handed_over(world: World, fails_at: int) -> None:
    """Another process of the node goes on; at ``fails_at`` (0 to 2; else not at all) it does not come about."""
    old = world.node
    if old._steward.busy:  # noqa: SLF001 - then the node refuses
        world.counts["hand-over refused"] += 1
        return
    fetching = any(level.fetches for level in old.carrier.levels)
    before = {known: page.ref for known, page in world.pages().items() if page.present or not fetching}
    figures = old.core.stats()
    state, descriptors = old._handing(0)  # noqa: SLF001 - the seam of the kit
    heir = Heir(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=HandOver), descriptors)
    images = _images(old)
    if fails_at == 0:
        world.counts["hand-over failed before"] += 1
        for descriptor in heir.descriptors:
            os.close(descriptor)
        return
    successor = _made(world, heir)
    if _images(old) != images:
        raise Violation("a successor wrote before it was the node")
    if fails_at == 1:
        world.counts["hand-over failed behind"] += 1
        successor.arena.leave()
        _close_rest(heir)
        return
    assert old._listener is not None  # noqa: SLF001
    successor._listener = Listener(old.config.socket, os.dup(heir.descriptors[1]))  # noqa: SLF001
    _close_rest(heir)
    clients = {seat.owner: seat for seat in (*world.seats, world.admin)}
    for one in cast("HandOver", heir.state).connections:
        seat = clients[one.owner]
        seat.node = seat.maps.node = successor
        successor._connections[one.owner] = cast("Connection", seat)  # noqa: SLF001
    world.remember(old)
    old._connections.clear()  # noqa: SLF001
    old._leave()  # noqa: SLF001
    old.arena.leave()
    world.former.append(Former(old, old.carrier._writer))  # noqa: SLF001
    world.node = successor
    after = {known: page.ref for known, page in world.pages().items() if page.present or not fetching}
    if after != before or not (fetching or successor.core.stats() == figures):
        raise Violation("a hand-over changed what is in the pool")
    _go(world)
    lost = successor.memory.lost
    successor.touch_more([one.number for one in successor.core.space.segments if one.size and one.number not in lost])
    if fails_at == 2:
        world.counts["ended right after a hand-over"] += 1
        crashed(world)
        return
    world.counts["hand-over"] += 1


def _images(node: HistoryNode) -> list[bytes]:
    return [bytes(node.arena.mapped(number)) for number in range(len(node.arena.sizes))]


def _close_rest(heir: Heir) -> None:
    """Close what of the descriptors the arena does not own."""
    segments = len(cast("HandOver", heir.state).arena.sizes)
    for descriptor in [*heir.descriptors[1:4], *heir.descriptors[4 + segments :]]:
        os.close(descriptor)


def end_former(world: World, position: int) -> None:
    """A process that was the node ends, whatever its threads were doing."""
    former = world.former.pop(position)
    world.counts["former process ended"] += 1
    world.counts["former process ended while it wrote"] += any(True for _ in former.node.fetching_into())
    former.node.workers.kill()
    carrier = world.node.carrier
    carrier._predecessors = [  # noqa: SLF001 - what the process table would say
        (GONE if owners[0] == former.writer else pid, owners)
        for pid, owners in carrier._predecessors  # noqa: SLF001
    ]


def finish(world: World) -> None:
    """All clients leave and time goes by: nothing may be left but pages.

    Raises:
        Violation: something is.
    """
    world.points.disarm()
    world.points.full = False
    world.below.mend()
    world.node.workers.mend()
    world.everybody_leaves()
    while world.former:
        end_former(world, 0)
    _idle(world, LIMBO_SECONDS + 15.0)
    laws.check(world)
    laws.nothing_held(world)
    laws.headers_agree(world)
    crashed(world)
    _idle(world, LIMBO_SECONDS + 1.0)
    laws.check(world)
    world.everybody_leaves()
    world.settle()
    laws.nothing_held(world)
    world.node.close()
    world.remember(world.node)


def _idle(world: World, seconds: float) -> None:
    """Nothing is wrong and nobody asks for anything: what was begun ends."""
    until = world.times.passed + seconds
    if world.below.places:
        while world.times.passed < until or not laws.all_work(world):
            work(world)
            world.let_pass(2.0)
            if world.times.passed > until + 100.0:
                raise Violation("a tier works again, and is not asked")
        work(world)
    else:
        for portion in (seconds, 1.0, 1.0, 1.0):
            world.let_pass(portion)


def work(world: World, most: int = 500, *, patient: bool = True) -> None:
    """Threads of tiers do what there is to be done, at most so many things; who is patient waits for what is slow.

    Raises:
        Violation: it does not end for the patient.
    """
    for _ in range(most):
        able = world.node.workers.can_do()
        if able:
            able[0]()
            world.settle()
        elif patient and world.node.workers.busy:
            world.let_pass(0.1)
        else:
            return
    if patient:
        raise Violation("the work of tiers does not end")
