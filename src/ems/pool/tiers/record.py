"""The stored form of pages: a pack, written in one go and never changed, which says what it is and proves it.

::

    0          112     112+n        head - tails    head      data, a multiple of 4096
    | preamble | name  | records    | tails         | zeros   | page 0 | page 1 | ...

The preamble has magic, format version, the namespace (its name follows), the size of its pages, counts and a checksum
over both.  A record has key, parent, place, lengths, codec, the checksums of the page and of what is stored, and a
checksum of itself that depends on the preamble's: it proves nothing within another pack.  Tails (the tokens of pages
that are not full) are one piece with a checksum, or encrypted.  All numbers are little-endian, all checksums CRC-32C.

What always holds: whatever :func:`parse_head` hands out was written by :func:`build_head`; what does not match its
checksum is left out and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ems.pool.checksum import crc32c
from ems.pool.keys import KEY_BYTES, Tail

MAGIC = b"EMSPACK1"
FORMAT_VERSION = 1
DATA_ALIGN = 4096
MAX_RECORDS = 65536
MAX_HEAD = 64 << 20
SEALED = 1
"""Flag: pages and tails are encrypted."""

_PREAMBLE = struct.Struct("<8sIIIIQQQd16s32s4xI")
PREAMBLE_BYTES = _PREAMBLE.size
RECORD = np.dtype([
    ("key", f"V{KEY_BYTES}"),
    ("parent", f"V{KEY_BYTES}"),
    ("offset", "<u8"),
    ("stored", "<u8"),
    ("length", "<u8"),
    ("codec", "<u4"),
    ("page_sum", "<u4"),
    ("stored_sum", "<u4"),
    ("nonce", "V12"),
    ("zero", "V12"),
    ("own_sum", "<u4"),
])  # fmt: skip
_SUMMED = RECORD.itemsize - 4

Records = NDArray[np.void]
Buffer = bytes | bytearray | memoryview


class Malformed(ValueError):
    """These bytes are no pack of this format; the text says why."""


class Entry(msgspec.Struct, frozen=True):
    """One page to be packed, as it will be stored."""

    key: bytes
    parent: bytes
    tail: Tail | None
    stored: int
    length: int
    codec: int
    page_sum: int
    stored_sum: int
    nonce: bytes = bytes(12)


class Head(msgspec.Struct, frozen=True):
    """What a pack says of itself.  ``damaged`` records and pieces of tails were left out."""

    namespace: str
    page_size: int
    pack_id: bytes
    salt: bytes
    stored_at: float
    sealed: bool
    total: int
    """Bytes of the whole pack."""
    records: Any
    """Array of :data:`RECORD`, only those that prove themselves."""
    tails: dict[int, Tail]
    """By position in ``records``."""
    damaged: int


class Sealer(msgspec.Struct, frozen=True):
    """How tails are encrypted and read again; bytes in, bytes out, None for what cannot be read."""

    salt: bytes
    seal: Callable[[bytes], bytes]


def build_head(
    namespace: str, page_size: int, pack_id: bytes, stored_at: float, entries: Sequence[Entry], sealer: Sealer | None
) -> tuple[bytes, Head]:
    """The bytes before the pages of a pack, and what they say; the pages follow in order without gaps."""
    listed = {position: entry.tail for position, entry in enumerate(entries) if entry.tail is not None}
    tails = msgspec.msgpack.encode(listed) if listed else b""
    tails = sealer.seal(tails) if sealer and tails else tails + struct.pack("<I", crc32c(tails)) if tails else b""
    name = namespace.encode()
    head = PREAMBLE_BYTES + len(name) + len(entries) * RECORD.itemsize + len(tails)
    data = -(-head // DATA_ALIGN) * DATA_ALIGN
    total = data + sum(entry.stored for entry in entries)
    flags = SEALED if sealer else 0
    salt = sealer.salt if sealer else bytes(32)
    fields = (
        MAGIC,
        FORMAT_VERSION,
        flags,
        len(name),
        len(tails),
        len(entries),
        page_size,
        total,
        stored_at,
        pack_id,
        salt,
    )
    bare = _PREAMBLE.pack(*fields, 0)[:-4]
    seed = crc32c(bare + name)
    records = _records(entries, data, seed)
    raw = b"".join([_PREAMBLE.pack(*fields, seed), name, records.tobytes(), tails, bytes(data - head)])
    said = Head(namespace, page_size, pack_id, salt, stored_at, bool(flags & SEALED), total, records, listed, 0)
    return raw, said


def _records(entries: Sequence[Entry], data: int, seed: int) -> Records:
    """A record of each entry; the first page begins at ``data``."""
    records = np.zeros(len(entries), dtype=RECORD)
    for name in ("key", "parent", "nonce"):
        records[name] = np.frombuffer(b"".join(getattr(entry, name) for entry in entries), dtype=RECORD[name])
    for name in ("stored", "length", "codec", "page_sum", "stored_sum"):
        records[name] = [getattr(entry, name) for entry in entries]
    records["offset"] = data + np.cumsum(records["stored"]) - records["stored"]
    table = records.view(np.uint8).data
    ends = range(_SUMMED, len(table), RECORD.itemsize)
    records["own_sum"] = [crc32c(table[end - _SUMMED : end], seed) for end in ends]
    return records


def head_bytes(start: Buffer) -> int:
    """How many bytes the head has whose first :data:`PREAMBLE_BYTES` are ``start``.

    Raises:
        Malformed: they begin no pack of this format.
    """
    if len(start) < PREAMBLE_BYTES:
        raise Malformed(f"{len(start)} bytes, expected a pack of at least {PREAMBLE_BYTES}")
    magic, version, _, name, tails, count, *_ = _PREAMBLE.unpack_from(start)
    if magic != MAGIC:
        raise Malformed("it does not begin like a pack")
    if version != FORMAT_VERSION:
        raise Malformed(f"format version {version}, this release reads {FORMAT_VERSION}")
    size = PREAMBLE_BYTES + name + count * RECORD.itemsize + tails
    if count > MAX_RECORDS or size > MAX_HEAD:
        raise Malformed("its preamble is damaged")
    return int(size)


def parse_head(raw: Buffer, unseal: Callable[[bytes, str, bytes], bytes | None]) -> Head:
    """What the head ``raw`` (at least :func:`head_bytes`) says; ``unseal(sealed, namespace, salt)`` opens tails.

    Raises:
        Malformed: it is no head, or not whole, or its preamble is damaged.
    """
    size = head_bytes(raw)
    if len(raw) < size:
        raise Malformed(f"{len(raw)} bytes of a head of {size}, the rest is missing")
    fields = _PREAMBLE.unpack_from(raw)
    _, _, flags, name_size, tails_size, count, page_size, total, stored_at, pack_id, salt, seed = fields
    name = bytes(raw[PREAMBLE_BYTES : PREAMBLE_BYTES + name_size])
    if crc32c(bytes(raw[: PREAMBLE_BYTES - 4]) + name) != seed:
        raise Malformed("its preamble is damaged")
    start = PREAMBLE_BYTES + name_size
    table = memoryview(raw)[start : start + count * RECORD.itemsize]
    records = np.frombuffer(table, dtype=RECORD).copy()
    wrong = [position for position in range(count) if not _proves_itself(table, position, seed)]
    if wrong:
        records = np.delete(records, wrong)
    tails: dict[int, Tail] = {}
    damaged = len(wrong)
    if tails_size:
        found = _parse_tails(bytes(raw[size - tails_size : size]), name.decode(), salt, flags, unseal)
        # Tails that are encrypted cannot be judged without their key.
        damaged += found is None and not flags & SEALED
        shifts = np.cumsum(np.isin(np.arange(count), wrong)) if wrong else np.zeros(count, dtype=int)
        kept = set(range(count)).difference(wrong)
        tails = {p - int(shifts[p]): tail for p, tail in (found or {}).items() if p in kept}
    return Head(
        name.decode(), page_size, pack_id, salt, stored_at, bool(flags & SEALED), total, records, tails, damaged
    )


def _proves_itself(table: memoryview, position: int, seed: int) -> bool:
    record = table[position * RECORD.itemsize : (position + 1) * RECORD.itemsize]
    return bool(struct.unpack_from("<I", record, _SUMMED)[0] == crc32c(record[:_SUMMED], seed))


def _parse_tails(
    raw: bytes, namespace: str, salt: bytes, flags: int, unseal: Callable[[bytes, str, bytes], bytes | None]
) -> dict[int, Tail] | None:
    if flags & SEALED:
        opened = unseal(raw, namespace, salt)
    else:
        opened = raw[:-4] if crc32c(raw[:-4]) == struct.unpack("<I", raw[-4:])[0] else None
    if opened is None:
        return None
    try:
        return msgspec.msgpack.decode(opened, type=dict[int, Tail])
    except msgspec.DecodeError:
        return None
