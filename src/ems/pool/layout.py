"""How bytes lie in a segment: its description, the table of slot headers, the slots.

::

    0                4096                     data_offset
    | description    | slot header 0..n-1     | slot 0 | slot 1 | ...
      4096 bytes       64 bytes each            slot_stride bytes each

All numbers are little-endian.  A header is written by the node alone: ``WRITING`` with a new generation
before a writer may touch the slot, ``PRESENT`` only after the writer said that all bytes are there, ``FREE``
when the page left.  A reader that finds state, generation and key unchanged after its copy knows that the bytes
are the page's.  Description and headers carry a checksum (CRC-32) of themselves and say all that a node that is
started again needs to know; what does not match its checksum is taken for no page.

A process that was cut off from its node can go on copying for any time, so a slot of it is free only once that process
has ended, has said that it stopped, or cannot reach the slot's memory any more (:class:`Writer`).  What always holds:
two processes are two writers, also where the second has the process id of the first.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from enum import IntEnum, IntFlag
from mmap import mmap
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

MAGIC = b"EMSSEG01"
FORMAT_VERSION = 2
HEADER_BYTES = 64
HEADERS_OFFSET = 4096
PAGE_ALIGN = 4096
MAX_PAGE = (1 << 32) - 1
"""Bytes of the largest page whose length a header can hold."""

_DESCRIPTION = struct.Struct("<8sIII16s16sQQQQIH")
_WORD = struct.Struct("<I")
_DESCRIPTION_CHECK = HEADERS_OFFSET - _WORD.size
_CARVING = struct.Struct("<Q")
_CARVING_OFFSET = 76
_VERSION = struct.Struct("<8sI")
_REF = struct.Struct("<III")
REF_BYTES = _REF.size
pack_ref, unpack_ref = _REF.pack, _REF.unpack
"""What :meth:`PageRef.pack`, :meth:`PageRef.unpack` and :func:`unpack_refs` do, of plain numbers."""
_HEADER = struct.Struct("<II16s16sQIII")
_CHECKED = struct.Struct(f"<{_HEADER.size}sI")
INSTANCE_BYTES = 8
"""Bytes of the random number by which a client knows its own promises again on another connection."""
_WRITER = struct.Struct("<II8s")
_MASK = 0xFFFFFFFF
_WHOLE = 0x2144DF1C
"""The CRC-32 of anything that ends with its own CRC-32, as a header does."""

Buffer = memoryview | bytearray | mmap
Array = np.ndarray[Any, np.dtype[Any]]


class SlotState(IntEnum):
    """What a slot header says about its slot."""

    FREE = 0
    WRITING = 1
    PRESENT = 2
    QUARANTINED = 3


class PageFlag(IntFlag):
    """What a slot header says about its page."""

    CHECKSUMMED = 1
    """The checksum is the CRC32C of the page's bytes."""
    FROM_BELOW = 2
    """The page was brought from a slower tier."""


class Writer(NamedTuple):
    """Who may write into a slot: one client of one process, as the slot's header remembers it.

    ``pid`` is 0 where the process cannot be seen from the node (a container has process ids of its own); ``start`` is
    when it began, ``pid_namespace`` says where its id means something, ``instance`` is the client's random number.
    """

    pid: int = 0
    start: int = 0
    instance: bytes = bytes(INSTANCE_BYTES)
    pid_namespace: int = 0

    @property
    def process(self) -> tuple[int, int, int] | bytes:
        """What all writers of one process have in common; of one that cannot be seen each client counts by itself."""
        return (self.pid, self.start, self.pid_namespace) if self.pid else self.instance

    def pack(self) -> bytes:
        return _WRITER.pack(self.pid & _MASK, self.start & _MASK, self.instance)

    @classmethod
    def unpack(cls, raw: bytes, pid_namespace: int) -> Writer:
        pid, start, instance = _WRITER.unpack(raw)
        return cls(pid, start, instance, pid_namespace)


UNKNOWN = Writer()
"""Stands for whoever was promised a slot whose header cannot be read."""


def writer_of(number: int) -> Writer:
    """The writer that stands for a client of the node of which nothing is known but its ``number``."""
    return Writer(instance=number.to_bytes(INSTANCE_BYTES, "little", signed=True))


class Header(NamedTuple):
    """A slot header.  ``parent`` is the key of the block before, zeros for none; ``stamp`` grows with each commit.

    While the slot is being written, ``parent`` and ``checksum`` say by whom (:class:`Writer`).
    """

    state: int
    generation: int
    key: bytes
    parent: bytes = bytes(16)
    stamp: int = 0
    length: int = 0
    checksum: int = 0
    flags: int = 0


HEADER = np.dtype(
    {"names": [*Header._fields, "check"], "formats": ["<u4", "<u4", "V16", "V16", "<u8", "<u4", "<u4", "<u4", "<u4"]}
)
"""A slot header with its checksum in an array."""
RAW_HEADER = np.dtype(f"V{HEADER_BYTES}")
"""The same as bytes, which are copied and compared five times as fast."""


class PageRef(NamedTuple):
    """Where a page lies: segment number, slot number, generation of the slot.  See :func:`slot_offset`."""

    segment: int
    slot: int
    generation: int

    def pack(self) -> bytes:
        return _REF.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> PageRef:
        return cls._make(_REF.unpack(raw))


def refs_begin(segment: int) -> bytes:
    return _WORD.pack(segment)


def unpack_refs(raw: bytes) -> list[PageRef]:
    return [PageRef._make(fields) for fields in _REF.iter_unpack(raw)]


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The checksum of a page's bytes, as fast as the processor can.

    From the AWS common runtime: of the packages that are well kept it is the fastest by a factor of two (it folds 512
    bits at a time where the processor can), takes memory that may change underneath, and lets other threads run
    meanwhile.  It is imported when the first checksum is needed.
    """
    from awscrt import checksums

    return checksums.crc32c(data, value)  # type: ignore[no-any-return, unused-ignore]


class Geometry(msgspec.Struct, frozen=True):
    """How one segment is carved for pages of ``page_size`` bytes."""

    segment_size: int
    page_size: int
    slot_stride: int
    slot_count: int
    data_offset: int

    def slot_offset(self, slot: int) -> int:
        return self.data_offset + slot * self.slot_stride

    def slots_within(self, touched: int) -> int:
        if touched < self.data_offset:
            return 0
        return min(self.slot_count, (touched - self.data_offset) // self.slot_stride)


class Description(msgspec.Struct, frozen=True):
    """What a segment says about itself.

    ``carving`` is another number each time that the segment is carved; slots that were never used since have the
    generation ``generation``.
    """

    segment: int
    namespace: str
    node_id: bytes
    geometry: Geometry
    carving: int
    generation: int


def header_offset(slot: int) -> int:
    return HEADERS_OFFSET + slot * HEADER_BYTES


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@functools.lru_cache(maxsize=256)
def carve(segment_size: int, page_size: int) -> Geometry:
    """The largest number of equal slots for ``page_size`` bytes that a segment holds (0 when none fits)."""
    stride = _align(page_size, PAGE_ALIGN if page_size >= 16 * PAGE_ALIGN else HEADER_BYTES)
    count = max((segment_size - HEADERS_OFFSET) // (stride + HEADER_BYTES), 0)
    while count and _align(header_offset(count), PAGE_ALIGN) + count * stride > segment_size:
        count -= 1
    return Geometry(segment_size, page_size, stride, count, _align(header_offset(count), PAGE_ALIGN))


def slot_offset(segment_size: int, page_size: int, slot: int) -> int:
    """Where a slot begins in a segment of ``segment_size`` bytes, which is carved for pages of ``page_size`` bytes."""
    return carve(segment_size, page_size).slot_offset(slot)


def namespace_digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]


def pack_description(description: Description) -> bytes:
    geometry, name = description.geometry, description.namespace.encode()
    raw = bytearray(HEADERS_OFFSET)
    digest, sizes = namespace_digest(description.namespace), (geometry.page_size, geometry.slot_stride)
    which = (MAGIC, FORMAT_VERSION, description.segment, geometry.slot_count, digest, description.node_id)
    ends = (geometry.data_offset, description.carving, description.generation, len(name))
    _DESCRIPTION.pack_into(raw, 0, *which, *sizes, *ends)
    raw[_DESCRIPTION.size : _DESCRIPTION.size + len(name)] = name
    _WORD.pack_into(raw, _DESCRIPTION_CHECK, zlib.crc32(memoryview(raw)[:_DESCRIPTION_CHECK]))
    return bytes(raw)


def unpack_description(raw: bytes, segment_size: int) -> Description | str | None:
    """What :func:`pack_description` wrote; why it cannot be read; None in a segment that was never carved."""
    if not any(raw):
        return None
    magic, version = _VERSION.unpack_from(raw)
    if magic != MAGIC:
        return "its description is damaged"
    if version != FORMAT_VERSION:
        return f"it has format {version}, this release reads format {FORMAT_VERSION}"
    if len(raw) != HEADERS_OFFSET or _WORD.unpack_from(raw, _DESCRIPTION_CHECK)[0] != zlib.crc32(
        raw[:_DESCRIPTION_CHECK]
    ):
        return "its description is damaged"
    fields = _DESCRIPTION.unpack_from(raw)
    _, _, segment, count, _, node_id, page_size, stride, offset, carving, generation, length = fields
    name = raw[_DESCRIPTION.size : _DESCRIPTION.size + length].decode(errors="replace")
    geometry = Geometry(segment_size, page_size, stride, count, offset)
    if geometry != carve(segment_size, page_size):
        return "it is carved in another way than this release carves"
    return Description(segment, name, node_id, geometry, carving, generation)


def belongs_to(segment: Buffer, digest: bytes) -> bool:
    return bytes(segment[20:36]) == digest


def carving_of(segment: Buffer) -> int:
    carving: int = _CARVING.unpack_from(segment, _CARVING_OFFSET)[0]
    return carving


def generation_of(segment: Buffer, slot: int) -> int:
    generation: int = _WORD.unpack_from(segment, header_offset(slot) + _WORD.size)[0]
    return generation


def pack_header(header: Header) -> bytes:
    """A whole slot header with its checksum, :data:`HEADER_BYTES` long."""
    return header_bytes(*header)


def header_bytes(*fields: int | bytes) -> bytes:
    """:func:`pack_header` of the fields of a :class:`Header`."""
    raw = _HEADER.pack(*fields)
    return _CHECKED.pack(raw, zlib.crc32(raw))


def unpack_header(buffer: memoryview | bytes | bytearray | mmap, offset: int) -> Header:
    return Header._make(_HEADER.unpack_from(buffer, offset))


def header_is_sound(buffer: memoryview | bytes | bytearray | mmap, offset: int) -> bool:
    raw = bytes(buffer[offset : offset + HEADER_BYTES])
    return bool(zlib.crc32(raw[: _HEADER.size]) == _WORD.unpack_from(raw, _HEADER.size)[0])


def headers_are_sound(headers: Array) -> npt.NDArray[np.bool_]:
    """:func:`header_is_sound` of many, which are :data:`HEADER`."""
    raw = headers.view(RAW_HEADER).tolist()
    return np.fromiter((zlib.crc32(one) == _WHOLE for one in raw), np.bool_, len(raw))
