"""How bytes lie in a segment: its description, the table of slot headers, the slots.

::

    0                4096                     data_offset
    | description    | slot header 0..n-1     | slot 0 | slot 1 | ...
      76 bytes         64 bytes each            slot_stride bytes each

All numbers are little-endian.  A header is written by the node alone: ``WRITING`` with a new generation
before a writer may touch the slot, ``PRESENT`` only after the writer said that all bytes are there.  A
reader that finds state, generation and key unchanged after its copy knows that the bytes are the page's.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

import msgspec

MAGIC = b"EMSSEG01"
FORMAT_VERSION = 1
HEADER_BYTES = 64
HEADERS_OFFSET = 4096
PAGE_ALIGN = 4096

_DESCRIPTION = struct.Struct("<8sIII16s16sQQII")
_REF = struct.Struct("<IIIQ")
_SEGMENT = struct.Struct("<I")
REF_BYTES = _REF.size
_HEADER = struct.Struct("<II16sQI")
_STATE = struct.Struct("<I")

Buffer = memoryview | bytearray | mmap


class SlotState(IntEnum):
    """What a slot header says about its slot."""

    FREE = 0
    WRITING = 1
    PRESENT = 2


class PageRef(NamedTuple):
    """Where a page lies: segment number, slot number, generation of the slot, byte offset of the slot."""

    segment: int
    slot: int
    generation: int
    offset: int

    def pack(self) -> bytes:
        """The 20 bytes in which a reference travels."""
        return _REF.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> PageRef:
        """The reference that :meth:`pack` wrote."""
        return cls._make(_REF.unpack(raw))


def refs_begin(segment: int) -> bytes:
    """The first bytes of every packed reference into ``segment``."""
    return _SEGMENT.pack(segment)


def unpack_refs(raw: bytes) -> list[PageRef]:
    """References that travelled as one byte string."""
    return [PageRef._make(fields) for fields in _REF.iter_unpack(raw)]


class Geometry(msgspec.Struct, frozen=True):
    """How one segment is carved for pages of ``page_size`` bytes."""

    segment_size: int
    page_size: int
    slot_stride: int
    slot_count: int
    data_offset: int

    def slot_offset(self, slot: int) -> int:
        """Byte offset of slot number ``slot`` in its segment."""
        return self.data_offset + slot * self.slot_stride

    def slots_within(self, touched: int) -> int:
        """How many leading slots lie whole in the first ``touched`` bytes."""
        if touched < self.data_offset:
            return 0
        return min(self.slot_count, (touched - self.data_offset) // self.slot_stride)


def header_offset(slot: int) -> int:
    """Byte offset of the header of slot number ``slot``."""
    return HEADERS_OFFSET + slot * HEADER_BYTES


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def carve(segment_size: int, page_size: int) -> Geometry:
    """The largest number of equal slots for ``page_size`` bytes that a segment holds (0 when none fits)."""
    stride = _align(page_size, PAGE_ALIGN if page_size >= 16 * PAGE_ALIGN else HEADER_BYTES)
    count = max((segment_size - HEADERS_OFFSET) // (stride + HEADER_BYTES), 0)
    while count and _align(header_offset(count), PAGE_ALIGN) + count * stride > segment_size:
        count -= 1
    return Geometry(segment_size, page_size, stride, count, _align(header_offset(count), PAGE_ALIGN))


def pack_description(segment: int, geometry: Geometry, namespace_id: bytes, node_id: bytes) -> bytes:
    """The description of a segment carved for the namespace with the 16-byte ``namespace_id``."""
    return _DESCRIPTION.pack(
        MAGIC,
        FORMAT_VERSION,
        segment,
        geometry.slot_count,
        namespace_id,
        node_id,
        geometry.page_size,
        geometry.slot_stride,
        geometry.data_offset,
        0,
    )


def write_header(segment: Buffer, ref: PageRef, state: SlotState, key: bytes, length: int) -> None:
    """Write the whole header of the slot of ``ref`` into its segment's memory."""
    _HEADER.pack_into(segment, HEADERS_OFFSET + ref.slot * HEADER_BYTES, state, ref.generation, key, length, 0)


def write_state(segment: Buffer, slot: int, state: SlotState) -> None:
    """Change what the header of slot number ``slot`` says about the slot, and nothing else."""
    _STATE.pack_into(segment, HEADERS_OFFSET + slot * HEADER_BYTES, state)


def unpack_header(buffer: memoryview | bytes | bytearray, offset: int) -> tuple[int, int, bytes, int]:
    """``(state, generation, key, length)`` of the header at ``offset``."""
    state, generation, key, length, _checksum = _HEADER.unpack_from(buffer, offset)
    return state, generation, key, length
