"""How nodes come and go: begun, killed, stopped, restarted, and what must be there after each of that."""

from __future__ import annotations

import os

from ems.errors import ConfigError
from ems.pool.core.deferred_frees import REPLACE_SECONDS
from ems.pool.layout import PageRef
from ems.pool.node.listener import Listener
from ems.pool.node.restart import KeptOpen
from ems.pool.segments.plan import MAX_SEGMENTS
from ems.pool.segments.tail_file import Listed
from ems.pool.tiers.manager import FLUSH_SECONDS
from tests.faults import invariants
from tests.faults.node import HistoryNode
from tests.faults.points import Crash
from tests.faults.settings import SEGMENT, SEGMENTS, Violation
from tests.faults.world import World
from tests.pool.brain import tails_of


def _made(world: World, kept_open: KeptOpen | None) -> HistoryNode:
    async def make() -> HistoryNode:
        return HistoryNode(world.config(), world.times, world.points, world.below, world, kept_open)

    return world.loop.run_until_complete(make())


def begin(world: World) -> None:
    """A node on what is there, for which time goes by from now on."""
    _begin(world)
    _go(world)


def _begin(world: World, kept_open: KeptOpen | None = None) -> None:
    """A node on what is there; where it cannot start it is started again, without what hindered it.

    A release that cannot start with what was ``kept_open`` open is one that was killed.
    """
    world.new_loop()
    while True:
        world.points.dead = False
        try:
            node = _made(world, kept_open)
        except Crash:
            world.counts["ended while it started"] += 1
            if kept_open is not None:
                os.close(kept_open.listener)  # as the kernel does; the arena has closed its part
            kept_open = None
            continue
        except ConfigError:
            world.counts["could not start"] += 1
            world.points.full = False
            if kept_open is not None:
                os.close(kept_open.listener)  # as the kernel does; the arena has closed its part
            kept_open = None
            continue
        break
    node.clients.listener = Listener(node.config.socket, None if kept_open is None else kept_open.listener)
    for number, size in enumerate(node.arena.sizes):
        os.posix_fallocate(node.arena._files[number].descriptor, 0, size)
        node.arena.touched[number] = size
        node.core.slots.touch(number, size)
    node.core.slots.touching_ended()
    world.life += 1
    world.node = node
    world.connect_all()


def _go(world: World) -> None:
    """From now on time goes by for the node."""
    node = world.node
    node.admin._audit = None
    node.arena._tails._compact_above = 300
    node.tier_manager.start()
    node._tick()


def crashed(world: World) -> None:
    """The node was killed: begin again on what is there, and look that it is what it must be."""
    world.points.dead = True
    world.counts["crash"] += 1
    dead = world.node
    world.remember(dead)
    dead.workers.kill()
    dead.tier_manager._closed = True
    dead.clients.connections.clear()
    dead.arena.leave()
    assert dead.clients.listener is not None
    dead.clients.listener.close(stays=True)
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
    kept_open: KeptOpen | None = None,
) -> None:
    must = {
        (namespace.name, page.key): page.ref
        for namespace in dead.core.namespaces
        for page in namespace.index
        if page.present and world.committed.get((namespace.name, page.key)) == page.ref
    }
    listed = {one for one in (tails or _tails_of(world, dead)) if one[:2] in must}
    for client in world.clients:
        world.cut_off(client)
    world.ends(dead.process)
    # A restart keeps all segments, whatever their numbers; a pool that was resized may have others than it began with.
    smaller = min(segments, world.sizes) if kept_open is None else MAX_SEGMENTS
    world.sizes = segments
    pinned = world.pinned
    world.pinned = {}
    _begin(world, kept_open)
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
    held = {(name, key): until for name, pins in node.core.pinned().items() for key, until in pins.items()}
    # A page that had left, its pin with it, may be back, since slots are freed a moment later: nobody pins it any more.
    forgotten = {known for known, until in pinned.items() if known in must and until > world.now} & found.keys()
    forgotten -= held.keys()
    if forgotten:
        raise Violation(f"{len(forgotten)} pins were lost with their node")
    world.pinned = {known: until for known, until in pinned.items() if known in held}
    world.committed = {known: page.ref for known, page in found.items()}
    lost = {one for one in listed if one[:2] in found and one[:2] not in world.tails_lost} - _tails_of(world, node)
    if lost and not world.tails_hurt:
        raise Violation(f"{len(lost)} of {len(listed)} tails were lost with their node")
    world.tails_hurt = False
    world.hurt_headers.clear()
    world.hurt_segments.clear()
    invariants.headers_agree(world)
    _go(world)


def _tails_of(world: World, node: HistoryNode) -> set[Listed]:
    return {one for one in tails_of(node.core) if one[:2] in world.committed}


def restarted(world: World) -> None:
    """The node restarts in its own process, unless an administrator's work is under way."""
    node = world.node
    if node.admin.busy:
        world.counts["restart refused"] += 1
        return
    world.account()
    tails = _tails_of(world, node)
    kept_open = node.keep_open(None)
    try:
        node.close()
    except Crash:
        world.points.dead = True
    world.surprises.clear()
    if world.points.dead:
        for descriptor in kept_open.descriptors:
            os.close(descriptor)
        raise Crash
    world.counts["restart"] += 1
    world.remember(node)
    node.workers.kill()
    _begin_again(world, node, kept_open.size // SEGMENT, tails, kept_open)


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
    _idle(world, REPLACE_SECONDS + 15.0)
    invariants.check(world)
    invariants.nothing_held(world)
    invariants.headers_agree(world)
    crashed(world)
    _idle(world, REPLACE_SECONDS + 1.0)
    invariants.check(world)
    world.everybody_leaves()
    world.settle()
    invariants.nothing_held(world)
    world.node.close()
    world.remember(world.node)


def _idle(world: World, seconds: float) -> None:
    """Nothing is wrong and nobody asks for anything: what was begun ends."""
    until = world.times.passed + seconds
    if world.below.places:
        while world.times.passed < until or not invariants.all_work(world):
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
