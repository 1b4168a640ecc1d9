"""A node's memory in this process: its segments, mapped when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ems.errors import StaleReference
from ems.pool.layout import MAGIC, PageRef, generation_of, slot_offset, vouches

_MARKED = len(MAGIC)


class Pins(Protocol):
    """Who has to know which memory is mapped: the driver of an accelerator."""

    def pin(self, buffer: memoryview) -> None:
        """A segment was mapped."""

    def unpin(self, buffer: memoryview) -> None:
        """A segment is about to be unmapped: no copy to or from it may run any more."""


class SegmentMap:
    """Segments of one node, mapped into this process when they are first needed."""

    def __init__(self, attach: Callable[[int], memoryview], pins: Pins | None) -> None:
        self._attach = attach
        """Maps a segment of the connection that this map belongs to."""
        self._pins = pins
        self._maps: dict[int, memoryview] = {}
        self._described: set[int] = set()
        """Those that had a description when they were mapped, as all of a tenant's have."""
        self._lock = threading.Lock()

    def segment(self, number: int) -> memoryview:
        mapped = self._maps.get(number)
        if mapped is None or self._is_dead(number, mapped):
            with self._lock:
                mapped = self._maps.get(number)
                if mapped is not None and self._is_dead(number, mapped):
                    if self._pins is not None:
                        self._pins.unpin(mapped)
                    mapped = None
                if mapped is None:
                    mapped = self._attach(number)
                    if self._pins is not None:
                        self._pins.pin(mapped)
                    self._maps[number] = mapped
                    if mapped[:_MARKED] == MAGIC:
                        self._described.add(number)
        return mapped

    def _is_dead(self, number: int, mapped: memoryview) -> bool:
        """Whether the segment was another tenant's meanwhile: its memory was replaced, and this is the old one."""
        return number in self._described and mapped[:_MARKED] != MAGIC

    def mapped(self) -> list[memoryview]:
        return list(self._maps.values())

    def page(self, ref: PageRef, size: int) -> memoryview:
        """A page's slot, for who was promised it; ``size`` is that of the pages of its namespace.

        Raises StaleReference: the slot, or the segment's memory, is another's by now.
        """
        segment = self.segment(ref.segment)
        if generation_of(segment, ref.slot) != ref.generation:
            raise StaleReference(f"slot {ref.slot} of segment {ref.segment} is not promised any more, reserve again")
        begin = slot_offset(len(segment), size, ref.slot)
        return segment[begin : begin + size]

    def holds(self, ref: PageRef, key: bytes) -> bool:
        return vouches(self.segment(ref.segment), ref.slot, ref.generation, key)
