"""How the bytes of pages get from segments into tiers and back, on the threads that work for tiers.

Where all clients are of one user a tier works on the segments' memory itself.  Where tenants are served, one of them
could cut its file while a tier looks at it, which would end the node for all: there the bytes are copied by the kernel,
through a buffer that each thread keeps.  What always holds: a page whose segment was cut is missing, and says nothing
about the tier; what a tier checks is what it stores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ems.pool.keys import Tail
from ems.pool.layout import crc32c
from ems.pool.segments.segment_file import FileRange
from ems.pool.tiers.answers import Outcome, Stored, Wanted

if TYPE_CHECKING:
    from ems.pool.tiers.packs import PackTier

_own = threading.local()


class Leaving(msgspec.Struct, frozen=True):
    """A page that is to be stored, and where it lies."""

    key: bytes
    parent: bytes
    tail: Tail | None
    place: FileRange
    checksum: int | None = None


def _buffer(size: int) -> memoryview:
    """``size`` bytes that are this thread's until it asks again."""
    kept: bytearray | None = getattr(_own, "buffer", None)
    if kept is None or len(kept) < size:
        kept = _own.buffer = bytearray(size)
    return memoryview(kept)[:size]


def _views(places: Sequence[FileRange]) -> list[tuple[memoryview, bool]]:
    """Memory for the bytes of ``places``, and whether it is another than theirs."""
    views = [place.view() for place in places]
    buffer = _buffer(sum(place.length for place, view in zip(places, views, strict=True) if view is None))
    found, at = [], 0
    for place, view in zip(places, views, strict=True):
        if view is None:
            found.append((buffer[at : at + place.length], True))
            at += place.length
        else:
            found.append((view, False))
    return found


def store(tier: PackTier, namespace: str, pages: Sequence[Leaving]) -> list[Outcome]:
    """Have ``tier`` keep ``pages``; blocks."""
    outcomes = [Outcome.MISSING] * len(pages)
    ready: dict[int, Stored] = {}
    for position, (payload, copied) in enumerate(_views([page.place for page in pages])):
        page = pages[position]
        if not copied or page.place.read_into(payload):
            ready[position] = Stored(page.key, page.parent, page.tail, payload, page.checksum)
    if ready:
        for position, outcome in zip(ready, tier.store(namespace, list(ready.values())), strict=True):
            outcomes[position] = outcome
    return outcomes


def load(tier: PackTier, namespace: str, wanted: Sequence[tuple[bytes, FileRange]]) -> tuple[list[Outcome], list[int]]:
    """Fetch pages by their keys: outcomes, and the checksums that readers of memory hold the pages against; blocks."""
    views = _views([place for _, place in wanted])
    outcomes = tier.load(namespace, [Wanted(key, into) for (key, _), (into, _) in zip(wanted, views, strict=True)])
    sums = [0] * len(wanted)
    for position, ((_, place), (into, copied)) in enumerate(zip(wanted, views, strict=True)):
        if outcomes[position] is Outcome.DONE:
            sums[position] = crc32c(into)
            if copied and not place.write(into):
                outcomes[position] = Outcome.MISSING
    return outcomes, sums
