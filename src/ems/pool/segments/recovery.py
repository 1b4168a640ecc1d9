"""What an earlier node left in its segments: which pages are there, how they hang together, which slots must rest.

A pure function from descriptions and header tables to what a new node begins with.  What always holds: only a page
whose header matches its own checksum and lies in touched memory comes back; whatever cannot be read, or no node wrote,
costs its slot or its segment and nothing else; a slot that somebody may still be writing into rests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import msgspec
import numpy as np
import numpy.typing as npt

from ems.pool.keys import NO_PARENT
from ems.pool.layout import (
    HEADER,
    HEADER_BYTES,
    HEADERS_OFFSET,
    MAX_PAGE,
    REF_BYTES,
    UNKNOWN,
    Description,
    SlotState,
    Writer,
    headers_are_sound,
    unpack_description,
)
from ems.pool.names import MAX_NAME

_REF = np.dtype([("segment", "<u4"), ("slot", "<u4"), ("generation", "<u4")])
MOST = 1 << 62
"""What stamps and carvings never reach: a larger one was written by a client, who can write into its segments."""
MAX_SLOTS = 1 << 20
"""Most slots of a segment; nobody is to keep a node busy with the carving of very many."""

Headers = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]


class SegmentImage(msgspec.Struct, frozen=True):
    """A segment as it was found: its file's size, how much of it is in memory, its first bytes with all headers."""

    number: int
    size: int
    touched: int
    raw: memoryview | bytes


class RecoveredPages(msgspec.Struct, frozen=True):
    """Present pages of a namespace as key, place and key of the block before, from the oldest to the newest."""

    name: str
    page_size: int
    pages: list[tuple[bytes, bytes, bytes]]


class RecoveredSegment(msgspec.Struct, frozen=True):
    """A segment that goes on as it was: its slots' generations, those with pages, those that must rest (packed).

    ``writers`` may still write into the latter.
    """

    number: int
    namespace: str
    page_size: int
    generations: list[int]
    present: list[int]
    resting: list[bytes]
    writers: list[Writer]


class Unreadable(msgspec.Struct, frozen=True):
    """A segment that begins anew, and why."""

    segment: int
    reason: str


class Recovered(msgspec.Struct, frozen=True):
    """All that is left.  ``stamp`` is above that of every page; ``carving`` above that of every segment; at most MOST.

    ``lost`` headers could not be read; ``stale`` slots (segment, number) held a page that lies elsewhere as well.
    """

    namespaces: list[RecoveredPages]
    segments: list[RecoveredSegment]
    unreadable: list[Unreadable]
    stale: list[tuple[int, int]]
    lost: int
    stamp: int
    carving: int


class _Found(msgspec.Struct, frozen=True):
    """One readable segment: its description, its headers, which of them vouch for a page, which slots rest."""

    description: Description
    headers: Headers
    present: Mask
    resting: Mask
    written: Mask
    """Those that rest whose header says by whom they were being written."""
    lost: int

    @property
    def writers(self) -> list[Writer]:
        headers, known = self.headers[self.resting], self.written[self.resting].tolist()
        fields = zip(headers["parent"].tolist(), headers["checksum"].tolist(), known, strict=True)
        return [Writer.unpack(packed, namespace) if sound else UNKNOWN for packed, namespace, sound in fields]

    def refs(self, slots: Mask) -> list[bytes]:
        numbers = np.flatnonzero(slots)
        refs = np.empty(len(numbers), dtype=_REF)
        refs["segment"], refs["slot"] = self.description.segment, numbers
        refs["generation"] = self.headers["generation"][numbers]
        packed: list[bytes] = refs.view(f"V{REF_BYTES}").tolist()
        return packed


def recover(images: Iterable[SegmentImage], stamps: int = MOST, carvings: int = MOST) -> Recovered:
    """What the segments in ``images`` hold; those without a description hold nothing and are not mentioned.

    No node gave ``stamps`` or ``carvings`` or more: pages with such stamps count as the oldest, and segments with such
    carvings are not believed.
    """
    found: list[_Found] = []
    unreadable: list[Unreadable] = []
    sizes: dict[str, int] = {}
    for image in images:
        known = _read(image, stamps, carvings)
        if isinstance(known, _Found):
            description = known.description
            page_size = sizes.setdefault(description.namespace, description.geometry.page_size)
            if page_size == description.geometry.page_size:
                found.append(known)
                continue
            known = "its namespace has another page size elsewhere"
        if known is not None:
            unreadable.append(Unreadable(image.number, known))
    stale: list[tuple[int, int]] = []
    namespaces = [
        _pages(name, size, [one for one in found if one.description.namespace == name], stale)
        for name, size in sizes.items()
    ]
    dropped = set(stale)
    return Recovered(
        namespaces,
        [_segment(one, dropped) for one in found],
        unreadable,
        stale,
        sum(one.lost for one in found),
        1 + max((int(one.headers["stamp"][one.present].max(initial=0)) for one in found), default=0),
        1 + max((one.description.carving for one in found), default=0),
    )


def _read(image: SegmentImage, stamps: int, carvings: int) -> _Found | str | None:
    description = unpack_description(bytes(image.raw[:HEADERS_OFFSET]), image.size)
    if description is None or isinstance(description, str):
        return description
    geometry = description.geometry
    if description.segment != image.number:
        return f"it says that it is segment {description.segment}"
    if not description.namespace.isprintable() or not 0 < len(description.namespace) <= MAX_NAME:
        return "its namespace has no name"
    if description.carving >= carvings or not 0 < geometry.slot_count <= MAX_SLOTS:
        return "its description is damaged"
    if not 0 < geometry.page_size <= MAX_PAGE:
        return "its description is damaged"
    table = image.raw[HEADERS_OFFSET : HEADERS_OFFSET + geometry.slot_count * HEADER_BYTES]
    if len(table) < geometry.slot_count * HEADER_BYTES:
        return "its file was cut"
    headers = np.frombuffer(table, HEADER).copy()
    used = headers["state"] != SlotState.FREE
    sound = np.zeros(len(headers), dtype=bool)
    sound[used] = headers_are_sound(headers[used])
    reach = np.arange(len(headers)) < geometry.slots_within(image.touched)
    sound &= headers["stamp"] < MOST
    headers["stamp"][headers["stamp"] >= stamps] = 0
    state = headers["state"]
    present = sound & reach & (state == SlotState.PRESENT) & (headers["length"] == geometry.page_size)
    # Who was writing may live; a header that cannot be read may be that of such a slot.
    resting = used & reach & ~present & ~(sound & (state == SlotState.QUARANTINED))
    lost = int(np.count_nonzero(used & ~present & ~(sound & (state != SlotState.PRESENT))))
    never_used = ~used & (headers["generation"] == 0)
    headers["generation"][never_used] = description.generation
    written = resting & sound & (state == SlotState.WRITING)
    return _Found(description, headers, present, resting, written, lost)


def _segment(found: _Found, dropped: set[tuple[int, int]]) -> RecoveredSegment:
    number = found.description.segment
    present = np.flatnonzero(found.present).tolist()
    return RecoveredSegment(
        number,
        found.description.namespace,
        found.description.geometry.page_size,
        found.headers["generation"].tolist(),
        [slot for slot in present if (number, slot) not in dropped] if dropped else present,
        found.refs(found.resting),
        found.writers,
    )


def _pages(name: str, page_size: int, found: Sequence[_Found], stale: list[tuple[int, int]]) -> RecoveredPages:
    """Join the pages of all segments of a namespace; slots of pages that are there twice go to ``stale``."""
    headers = np.concatenate([one.headers[one.present] for one in found])
    refs = [ref for one in found for ref in one.refs(one.present)]
    newest_first = np.argsort(headers["stamp"], kind="stable")[::-1]
    keys, parents = headers["key"][newest_first].tolist(), headers["parent"][newest_first].tolist()
    places = [refs[position] for position in newest_first]
    position_of: dict[bytes, int] = {}
    for position, key in enumerate(keys):
        if position_of.setdefault(key, position) != position:
            ref = np.frombuffer(places[position], dtype=_REF)[0]
            stale.append((int(ref["segment"]), int(ref["slot"])))
    pages = [(keys[p], places[p], before) for p, before in _in_order(keys, parents, position_of)]
    pages.reverse()
    return RecoveredPages(name, page_size, pages)


def _in_order(keys: list[bytes], parents: list[bytes], position_of: dict[bytes, int]) -> Iterator[tuple[int, bytes]]:
    """Positions from the most recently used page to the least, each prefix before what hangs on it.

    With each comes the key of the block before; a ring, which no honest writer makes, is cut.
    """
    codes = bytearray(len(keys))
    for position in compress(range(len(keys)), [position_of[key] == at for at, key in enumerate(keys)]):
        path: list[int] = []
        at: int | None = position
        while at is not None and not codes[at]:
            codes[at] = 1
            path.append(at)
            at = position_of.get(parents[at])
        ring = at is not None and bool(path) and at in path
        for step, one in enumerate(reversed(path)):
            yield one, NO_PARENT if ring and step == 0 else parents[one]
