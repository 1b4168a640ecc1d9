"""What does not hold in the brains of tiers, one sentence each; nothing when all is well."""

from __future__ import annotations

from ems.pool.movement.promotion import Promotions
from ems.pool.movement.write_back import WriteBackQueue
from ems.pool.tiers.catalogue import _POSITION_BITS, Catalogue


def wrong_promotions(promotions: Promotions) -> list[str]:
    broken = []
    for (tier, urgent), size in promotions._waiting.items():
        wants = [want for want in promotions._wants.values() if want.tier == tier and want.urgent is urgent]
        wanted = sum(len(want.keys) * want.page_size for want in wants)
        if size != wanted:
            broken.append(f"{size} bytes of tier {tier} are said to wait ({urgent=}), {wanted} do")
    if promotions._wanted.total() != sum(len(want.keys) for want in promotions._wants.values()):
        broken.append("the keys that wait are miscounted")
    if promotions.under_way < 0:
        broken.append("more ended than was under way")
    return broken


def wrong_queue(queue: WriteBackQueue) -> list[str]:
    broken = []
    waiting = sum(unit.size for units in queue._waiting.values() for unit in units)
    if not waiting <= queue.size <= queue._limit:
        broken.append(f"{queue.size} bytes are queued, {waiting} of them wait, the limit is {queue._limit}")
    return broken


def wrong_catalogue(catalogue: Catalogue) -> list[str]:
    broken = []
    if catalogue.bytes != sum(pack.size for pack in catalogue._packs.values()):
        broken.append("the catalogue miscounts its bytes")
    if catalogue.pages != sum(len(known.pages) for known in catalogue._namespaces.values()):
        broken.append("the catalogue miscounts its pages")
    if catalogue.bytes != sum(known.size for known in catalogue._namespaces.values()):
        broken.append("the catalogue miscounts the bytes of namespaces")
    for name, known in catalogue._namespaces.items():
        for key in known.pages:
            place = catalogue.find(name, key)
            if place is None or place.pack.keys[place.position] != key:
                broken.append(f"page {key.hex()} is in no pack")
        for key, numbers in known.elsewhere.items():
            gone = [number for number in numbers if number >> _POSITION_BITS not in catalogue._packs]
            if gone or not numbers or key not in known.pages or known.pages[key] in numbers:
                broken.append(f"page {key.hex()} is not where it is said to be a second time")
        tails = {(tail.directory, tail.tokens) for listed in known.tails.values() for tail in listed}
        packs = [pack for pack in catalogue if pack.head.namespace == name]
        written = {(tail.directory, tail.tokens) for pack in packs for tail in pack.head.tails.values()}
        broken += [f"tail of {directory.hex()} has no page" for directory, tokens in tails
                   if (directory, tokens) not in written]  # fmt: skip
    return broken
