"""Short hands for tests of the pool's brain: cores of a few slots, chains of keys, one-step saves."""

from __future__ import annotations

import hashlib

from ems.pool.core.pool_core import PoolCore
from ems.pool.core.reservations import UncommittedLimits
from ems.pool.core.writing import Reserved
from ems.pool.keys import NO_PARENT, Tail
from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, PageRef, carve
from ems.pool.pages import Outcome, Page
from ems.pool.segments.recovery import Recovered, RecoveredPages, RecoveredSegment

PAGE = 64 << 10
"""Bytes of a page that keeps segments small and page-aligned."""


def segment_for(slots: int, page_size: int = PAGE) -> int:
    """Bytes of the smallest segment with ``slots`` slots for pages of ``page_size`` bytes."""
    size = HEADERS_OFFSET + slots * (page_size + HEADER_BYTES)
    while carve(size, page_size).slot_count < slots:
        size += 4096
    return size


def core_of(*slots: int, touched: bool = True, high_watermark: float = 1.0, eviction_ratio: float = 0.05) -> PoolCore:
    """A core with one segment for each number of ``slots``; what bounds a writer is out of the way unless given."""
    sizes = [segment_for(count) for count in slots]
    limits = UncommittedLimits(share=1.0, together_share=1.0)
    core = PoolCore(sizes, high_watermark=high_watermark, eviction_ratio=eviction_ratio, limits=limits)
    if touched:
        for number, size in enumerate(sizes):
            core.slots.touch(number, size)
        core.slots.touching_ended()
    return core


def key(name: object) -> bytes:
    """A key for ``name``."""
    return hashlib.sha256(str(name).encode()).digest()[:16]


def chain(name: str, length: int) -> list[bytes]:
    """Keys of ``length`` consecutive blocks."""
    return [key(f"{name}/{block}") for block in range(length)]


def tails_of(core: PoolCore) -> set[tuple[str, bytes, bytes, Tail]]:
    """Namespace, key, place and tokens of all pages that are found by their tokens."""
    return {
        (known.name, page.key, page.ref, page.tail)
        for known in core.namespaces
        for page in known.index
        if page.tail is not None
    }


def save(
    core: PoolCore, namespace: int, keys: list[bytes], parent: bytes = bytes(NO_PARENT), client_id: int = 1
) -> Reserved:
    """Reserve and commit ``keys``."""
    reserved = core.writing.reserve(client_id, namespace, parent, keys)
    if reserved.granted:
        core.writing.commit(client_id, reserved.reservation)
    return reserved


def present(core: PoolCore, namespace: int, keys: list[bytes]) -> list[bytes]:
    """Those of ``keys`` that are present, each asked for by itself."""
    return [one for one in keys if core.reading.lookup(0, namespace, [one], lease=False).pages]


def outcomes(reserved: Reserved) -> list[Outcome]:
    """The outcomes of a reservation by name."""
    return [Outcome(outcome) for outcome in reserved.outcomes]


def refs(pages: list[Page]) -> list[bytes]:
    """Where pages lie."""
    return [page.ref for page in pages]


def restarted(core: PoolCore) -> PoolCore:
    """A core that begins with what ``core`` left: its pages in the order in which recovery finds them."""
    after = PoolCore([segment.size for segment in core.slots.segments], high_watermark=1.0)
    for number, segment in enumerate(core.slots.segments):
        after.slots.touch(number, segment.size)
    after.slots.touching_ended()
    namespaces = []
    for namespace in core.namespaces:
        told: dict[Page, bytes] = {}
        for newest in reversed([page for page in namespace.index if page.present]):
            path = [newest, *(one for one in newest.ancestors() if one.present)]
            for page in reversed(path):
                told.setdefault(page, NO_PARENT if page.parent is None else page.parent.key)
        pages = [(page.key, page.ref, before) for page, before in told.items()][::-1]
        namespaces.append(RecoveredPages(namespace.name, namespace.page_size, pages))
    segments = [
        RecoveredSegment(
            segment.number,
            core.namespaces[segment.namespace].name,
            segment.geometry.page_size,
            list(segment.generations),
            [
                ref.slot
                for page in core.namespaces[segment.namespace].index
                if page.present and (ref := PageRef.unpack(page.ref)).segment == segment.number
            ],
            [],
            [],
        )
        for segment in core.slots.segments
        if segment.namespace is not None and segment.geometry is not None
    ]
    after.adopt(Recovered(namespaces, segments, [], [], 0, 1, 1), [], 0.0)
    return after
