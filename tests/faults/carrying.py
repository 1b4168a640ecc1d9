"""What happens between memory and tiers: threads work in any order, places fail and lie, others write there, too."""

from __future__ import annotations

from ems.errors import TierFailed
from ems.pool.protocol import messages
from ems.pool.protocol.acts import Clear
from ems.pool.tiers.answers import Stored
from tests.faults import administering, lifecycle, readers, writers
from tests.faults.asking import PATHS, ask, name_of, opened_namespace, run_of, seat_of
from tests.faults.faulty_store import FAULTS
from tests.faults.settings import Violation, block_key, called, content
from tests.faults.world import World

MOST_ROUNDS = 60
"""Half seconds for which whoever waits for tiers that do nothing may be told to: two time-outs and a few."""


def work(world: World, a: int, b: int, c: int) -> None:
    """Threads begin and end what they may, in any order."""
    for turn in range(a % 8 + 1):
        able = world.node.workers.can_do()
        if not able:
            return
        able[(b + turn * c) % len(able)]()
        if (b + turn) % 3:  # else the node hears of several things at once
            world.settle()
    world.settle()


def keep_up(world: World, _a: int, _b: int, _c: int) -> None:
    """Threads do what there is to be done, and time goes by in which more comes up."""
    if world.below.places:
        for _ in range(3):
            lifecycle.work(world, 40, patient=False)
            world.let_pass(0.3)
        lifecycle.work(world, 40, patient=False)


def break_place(world: World, a: int, b: int, _: int) -> None:
    """Something is wrong with a place, or no longer."""
    if world.below.places:
        world.below.places[b % len(world.below.places)].wrong ^= {FAULTS[a % len(FAULTS)]}


def mend_place(world: World, a: int, b: int, _: int) -> None:
    """Nothing is wrong with a place any more; what hung there may go on hanging."""
    if world.below.places:
        world.below.places[a % len(world.below.places)].wrong.clear()
        if b % 2:
            world.node.workers.mend()


def flip_blob(world: World, a: int, b: int, c: int) -> None:
    """A bit of what a place keeps is wrong, or the end of it is missing, or all of it."""
    for place in world.below.places[a % 2 :][:1]:
        names = list(place.contents)
        if not names:
            return
        name = names[a // 2 % len(names)]
        raw = bytearray(place.contents[name])
        if c % 8 == 0:
            del place.contents[name]
            world.counts["a place lost a blob"] += 1
            return
        if not raw:
            return
        if c % 8 == 1:
            del raw[b % len(raw) :]
        else:
            # Heads are short beside pages, and are to be hit as well.
            raw[b % min(len(raw), 400 if b % 3 else len(raw))] ^= 1 << c % 8
        place.contents[name] = bytes(raw)
        world.counts["a place damaged a blob"] += 1


def other_node(world: World, a: int, b: int, c: int) -> None:
    """Another node stores pages in the same place."""
    if not world.below.places:
        return
    number = a % len(world.below.places)
    tenant = world.clients[a % len(world.clients)].tenant
    name = called(tenant, name_of(b))
    path = PATHS[c % len(PATHS)]
    keys = [block_key(path[: end + 1]) for end in range(len(path))]
    pages, parent = [], bytes(16)
    for key in keys:
        pages.append(Stored(key, parent, None, memoryview(content(name, key))))
        parent = key
        world.meaning.setdefault(key, (path, None))
        world.ever.add((name, key))
    try:
        tier = world.below.tier(number)
        tier.maintain()
        tier.store(name, pages)
    except TierFailed:
        return
    world.counts["another node stored pages"] += 1


def prefetch(world: World, a: int, b: int, c: int) -> None:
    """A client says that it will need pages."""
    client = seat_of(world, a)
    number = opened_namespace(world, client, name_of(b))
    if number is not None:
        ask(world, client, messages.Prefetch(number, b"".join(run_of(c)[0])), messages.Done)


def await_pages(world: World, a: int, b: int, c: int) -> None:
    """A client is told that pages come up, and asks again until none do any more, while threads may hang."""
    client = seat_of(world, a)
    path = PATHS[c % len(PATHS)]
    keys = b"".join(block_key(path[: end + 1]) for end in range(len(path)))
    came = world.counts["page promoted"]
    for turn in range(MOST_ROUNDS):
        number = opened_namespace(world, client, name_of(b))
        if number is None:
            return
        hits = ask(world, client, messages.Lookup(number, keys), messages.Hits)
        world.settle()
        if hits is None or not hits.below:
            world.counts["waited for a tier"] += bool(turn)
            return
        if b % 3:
            lifecycle.work(world, 10, patient=False)
        else:
            world.node.workers.begin()
        world.let_pass(0.5)
    if world.counts["page promoted"] == came:
        raise Violation("a client is told over and over to wait for pages that do not come")
    world.counts["pages came up and left again"] += 1


def down_and_up(world: World, a: int, b: int, c: int) -> None:
    """Pages are saved, go down, leave memory, and are wanted again: all that takes many steps otherwise."""
    writers.save(world, a, b, c)
    keep_up(world, a, b, c)
    tenant = world.clients[a % len(world.clients)].tenant
    administering.act(world, Clear(namespace=called(tenant, name_of(b)), memory_only=True))
    await_pages(world, a, b, c)
    readers.load(world, a, b // 4 * 4, c)


def fail_while_more_waits(world: World, a: int, b: int, c: int) -> None:
    """A place fails while more is to be fetched than it has threads: what none of them began is called off."""
    if not world.below.places:
        return
    chains = [at + len(PATHS) * 12 for at in (PATHS.index("abcd"), PATHS.index("klm"), PATHS.index("qr"))]
    for chain in chains:
        writers.save(world, a, b, chain)
    keep_up(world, a, b, c)
    tenant = world.clients[a % len(world.clients)].tenant
    administering.act(world, Clear(namespace=called(tenant, name_of(b)), memory_only=True))
    for chain in chains:
        prefetch(world, a, b, chain)
    world.settle()
    wrong = world.below.places[0].wrong
    before = set(wrong)
    wrong.add("fails")
    world.node.workers.begin()
    world.let_pass(0.1)
    lifecycle.work(world, 10, patient=False)
    wrong.clear()
    wrong.update(before)
