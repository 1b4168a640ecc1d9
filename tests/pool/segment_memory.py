"""Bytes of a node's segments, as tests look at them and damage them."""

from __future__ import annotations

from ems.pool.layout import PageRef, slot_offset
from ems.pool.segments.arena import Arena


def map_segment(arena: Arena, segment: int) -> memoryview:
    """All of a segment, mapped; only where nobody cuts its file."""
    view = arena._files[segment].view(0, arena.sizes[segment])
    assert view is not None
    return view


def page_memory(arena: Arena, ref: PageRef, size: int) -> memoryview:
    """The ``size`` bytes of a page, in its mapped segment."""
    begin = slot_offset(arena.sizes[ref.segment], size, ref.slot)
    return map_segment(arena, ref.segment)[begin : begin + size]
