"""Slot headers written straight into a segment's memory, as a node writes them into its file."""

from __future__ import annotations

from mmap import mmap

from ems.pool.layout import HEADER_BYTES, Header, SlotState, header_offset, pack_header


def write_header(segment: memoryview | bytearray | mmap, slot: int, header: Header) -> None:
    offset = header_offset(slot)
    segment[offset : offset + HEADER_BYTES] = pack_header(header)


def write_state(segment: memoryview | bytearray | mmap, slot: int, state: SlotState) -> None:
    offset = header_offset(slot)
    segment[offset : offset + 4] = state.to_bytes(4, "little")
