"""Short hands for tests of the pool's brain: cores of a few slots, chains of keys, one-step saves."""

from __future__ import annotations

import hashlib

from ems.pool.core.answers import Reserved
from ems.pool.core.index import Page
from ems.pool.core.pool_core import PoolCore
from ems.pool.core.room import Outcome
from ems.pool.keys import NO_PARENT
from ems.pool.segments.layout import HEADER_BYTES, HEADERS_OFFSET, carve

PAGE = 64 << 10
"""Bytes of a page that keeps segments small and page-aligned."""


def segment_for(slots: int, page_size: int = PAGE) -> int:
    """Bytes of the smallest segment with ``slots`` slots for pages of ``page_size`` bytes."""
    size = HEADERS_OFFSET + slots * (page_size + HEADER_BYTES)
    while carve(size, page_size).slot_count < slots:
        size += 4096
    return size


def core_of(*slots: int, touched: bool = True, high_watermark: float = 1.0, eviction_ratio: float = 0.05) -> PoolCore:
    """A core with one segment for each number of ``slots``; the watermark is out of the way unless given."""
    sizes = [segment_for(count) for count in slots]
    core = PoolCore(sizes, high_watermark=high_watermark, eviction_ratio=eviction_ratio)
    if touched:
        for number, size in enumerate(sizes):
            core.touched(number, size)
        core.touching_ended()
    return core


def key(name: object) -> bytes:
    """A key for ``name``."""
    return hashlib.sha256(str(name).encode()).digest()[:16]


def chain(name: str, length: int) -> list[bytes]:
    """Keys of ``length`` consecutive blocks."""
    return [key(f"{name}/{block}") for block in range(length)]


def save(
    core: PoolCore, namespace: int, keys: list[bytes], parent: bytes = bytes(NO_PARENT), owner: int = 1
) -> Reserved:
    """Reserve and commit ``keys``."""
    reserved = core.reserve(owner, namespace, parent, keys)
    if reserved.granted:
        core.commit(owner, reserved.reservation)
    return reserved


def present(core: PoolCore, namespace: int, keys: list[bytes]) -> list[bytes]:
    """Those of ``keys`` that are present, each asked for by itself."""
    return [one for one in keys if core.lookup(0, namespace, [one], lease=False).pages]


def outcomes(reserved: Reserved) -> list[Outcome]:
    """The outcomes of a reservation by name."""
    return [Outcome(outcome) for outcome in reserved.outcomes]


def refs(pages: list[Page]) -> list[bytes]:
    """Where pages lie."""
    return [page.ref for page in pages]
