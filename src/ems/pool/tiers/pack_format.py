"""The stored form of pages: a pack, written in one go and never changed, which says what it is and proves it.

::

    0          120     120+n        head - tails    head      data, a multiple of 4096
    | preamble | name  | records    | tails         | zeros   | page 0 | page 1 | ... | name | preamble |

The preamble has magic, format version, counts, the size of pages, a salt, a seal over itself and the name of the
namespace (:mod:`ems.pool.tiers.pack_seal`), and a checksum of both.  Preamble and name stand at the end once more, so
that damage to either costs no page.  A record has key, parent, place, lengths, codec, the checksums of the page and of
what is stored, nonce and tag, and a checksum of itself that depends on the preamble's: it proves nothing within another
pack.  Tails (the tokens of pages that are not full) are sealed in one piece.  All numbers are little-endian, all
checksums CRC-32C.

What always holds: whatever :func:`parse_head` hands out was written by :func:`build_head`, as far as checksums tell;
what does not match its checksum is left out and counted.  Only :func:`open_page` tells who wrote a page.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ems.pool.checksum import crc32c
from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.tiers.pack_seal import PackSeal

if TYPE_CHECKING:
    from ems.pool.tiers.pack_seal import SealKeys

MAGIC = b"EMSPACK1"
FORMAT_VERSION = 2
DATA_ALIGN = 4096
MAX_RECORDS = 65536
MAX_HEAD = 64 << 20
FIRST_READ = 32 << 10
"""Bytes of a head that are worth reading at once; the heads of most packs are shorter."""
PACK_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{12}-[0-9a-f]{16}\.pack")
_ENCRYPTED = 1
_TAILS = b"tails"

_SAID = struct.Struct("<8sIIIIQQQd32s")
_PROOF = struct.Struct("<12s16sI")
PREAMBLE_BYTES = _SAID.size + _PROOF.size
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
    ("tag", "V16"),
    ("own_sum", "<u4"),
])  # fmt: skip
_SUMMED = RECORD.itemsize - 4

Records = NDArray[np.void]
Buffer = bytes | bytearray | memoryview


class Record(NamedTuple):
    """One element of :data:`RECORD`."""

    key: bytes
    parent: bytes
    offset: int
    stored: int
    length: int
    codec: int
    page_sum: int
    stored_sum: int
    nonce: bytes
    tag: bytes
    own_sum: int


class Malformed(ValueError):
    """These bytes are no pack of this format; the text says why."""


class Head(msgspec.Struct, frozen=True):
    """What a pack says of itself.  ``damaged`` records and pieces of tails were left out."""

    namespace: str
    page_size: int
    stored_at: float
    total: int
    """Bytes of the whole pack."""
    records: Any
    """Array of :data:`RECORD`, only those that match their checksums."""
    tails: dict[int, Tail]
    """By position in ``records``; none without ``seal``."""
    damaged: int
    seal: PackSeal | None
    """None when it was sealed with another key than those at hand."""
    encrypted: bool
    raw: bytes
    """All of it, without the zeros."""


def folder_of(namespace: str) -> str:
    """Where the packs of ``namespace`` are."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def pack_name(namespace: str, now: float, unique: str) -> str:
    """What a pack is called that is written ``now``; ``unique`` is 16 random hex digits."""
    return f"{folder_of(namespace)}/{int(now * 1000):012x}-{unique}.pack"


def page_names(namespace: str, key: bytes, parent: bytes, length: int, codec: int) -> bytes:
    """What a page is sealed with: its place among all pages, and what its bytes are."""
    return msgspec.msgpack.encode((namespace, key, parent, length, int(codec)))


def open_page(head: Head, record: Record, stored: Buffer) -> Buffer | None:
    """The page that ``stored`` holds, as it was before it was encrypted; None when it is not what was sealed."""
    if head.seal is None:
        return None
    names = page_names(head.namespace, record.key, record.parent, record.length, record.codec)
    return head.seal.open(stored, record.nonce, record.tag, names)


def build_head(
    namespace: str, page_size: int, stored_at: float, records: Records, tails: Mapping[int, Tail], seal: PackSeal
) -> tuple[bytes, bytes, Head]:
    """The bytes before and behind the pages of a pack, and what they say.

    The pages follow in the order of ``records``, whose offsets and own checksums are filled in here.
    """
    name = namespace.encode()
    sealed = b""
    if tails:
        nonce, tag, stored = seal.seal(msgspec.msgpack.encode(dict(tails)), _TAILS)
        sealed = nonce + tag + bytes(stored)
    size = PREAMBLE_BYTES + len(name) + records.nbytes + len(sealed)
    data = -(-size // DATA_ALIGN) * DATA_ALIGN
    total = data + int(records["stored"].sum()) + len(name) + PREAMBLE_BYTES
    counts = (len(name), len(sealed), len(records), page_size, total, stored_at)
    said = _SAID.pack(MAGIC, FORMAT_VERSION, _ENCRYPTED * seal.encrypts, *counts, seal.salt)
    nonce, tag, _ = seal.seal(b"", said + name)
    seed = crc32c(said + nonce + tag + name)
    preamble = said + _PROOF.pack(nonce, tag, seed)
    records["offset"] = data + np.cumsum(records["stored"]) - records["stored"]
    records["own_sum"] = _own_sums(records.tobytes(), seed)
    raw = b"".join([preamble, name, records.tobytes(), sealed])
    head = Head(namespace, page_size, stored_at, total, records, dict(tails), 0, seal, seal.encrypts, raw)
    return raw + bytes(data - size), name + preamble, head


def _own_sums(table: Buffer, seed: int) -> list[int]:
    view = memoryview(table)
    return [crc32c(view[start : start + _SUMMED], seed) for start in range(0, len(view), RECORD.itemsize)]


def head_bytes(start: Buffer) -> int:
    """How many bytes the head has whose first :data:`PREAMBLE_BYTES` are ``start``.

    Raises:
        Malformed: they begin no pack of this format.
    """
    if len(start) < PREAMBLE_BYTES:
        raise Malformed(f"{len(start)} bytes, expected a pack of at least {PREAMBLE_BYTES}")
    magic, version, _, name, tails, count, *_ = _SAID.unpack_from(start)
    if magic != MAGIC:
        raise Malformed("it does not begin like a pack")
    if version != FORMAT_VERSION:
        raise Malformed(f"format version {version}, this release reads {FORMAT_VERSION}")
    size = PREAMBLE_BYTES + name + count * RECORD.itemsize + tails
    if count > MAX_RECORDS or size > MAX_HEAD:
        raise Malformed("its preamble is damaged")
    return int(size)


def parse_head(raw: Buffer, keys: SealKeys | None) -> Head:
    """What the head ``raw`` (at least :func:`head_bytes`) says.

    Raises:
        Malformed: it is no head, or not whole, or its preamble is damaged.
    """
    size = head_bytes(raw)
    if len(raw) < size:
        raise Malformed(f"{len(raw)} bytes of a head of {size}, the rest is missing")
    raw = bytes(raw[:size])
    _, _, flags, name_size, tails_size, count, page_size, total, stored_at, salt = _SAID.unpack_from(raw)
    nonce, tag, seed = _PROOF.unpack_from(raw, _SAID.size)
    start = PREAMBLE_BYTES + name_size
    name = raw[PREAMBLE_BYTES:start]
    if crc32c(raw[: PREAMBLE_BYTES - 4] + name) != seed:
        raise Malformed("its preamble is damaged")
    try:
        namespace = name.decode()
    except UnicodeDecodeError as error:
        raise Malformed("the name of its namespace is no text") from error
    encrypted = bool(flags & _ENCRYPTED)
    seal = keys.pack(namespace, salt) if keys is not None and keys.encrypts == encrypted else None
    if seal is not None and seal.open(b"", nonce, tag, raw[: _SAID.size] + name) is None:
        seal = None
    table = raw[start : start + count * RECORD.itemsize]
    records = np.frombuffer(table, dtype=RECORD)
    right = records["own_sum"] == np.array(_own_sums(table, seed), dtype="<u4")
    tails, whole = _parse_tails(raw[size - tails_size :], seal) if tails_size else ({}, True)
    damaged = count - int(right.sum()) + (not whole)
    if not right.all():
        records, tails = _only(right, records, tails)
    # A page whose tokens are not those that its key stands for would be found and be wrong.
    strange = [at for at, tail in tails.items() if at >= len(records) or tail.key != records["key"][at].tobytes()]
    for at in strange:
        del tails[at]
    return Head(namespace, page_size, stored_at, total, records, tails, damaged + len(strange), seal, encrypted, raw)


def _parse_tails(raw: bytes, seal: PackSeal | None) -> tuple[dict[int, Tail], bool]:
    """Tails by position, and whether they are whole, as far as that can be told."""
    if seal is None:
        return {}, True
    opened = seal.open(raw[28:], raw[:12], raw[12:28], _TAILS)
    try:
        return ({}, False) if opened is None else (msgspec.msgpack.decode(opened, type=dict[int, Tail]), True)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}, False


def _only(kept: Any, records: Records, tails: Mapping[int, Tail]) -> tuple[Records, dict[int, Tail]]:
    """The ``records`` that are ``kept``, by an array of booleans, and their tails."""
    new = np.cumsum(kept) - 1
    return records[kept], {int(new[at]): tail for at, tail in tails.items() if at < len(kept) and kept[at]}


def fitting(head: Head, name: str, size: int) -> Head:
    """``head`` as that of the blob ``name`` of ``size`` bytes: without pages that do not lie in it.

    Raises:
        Malformed: it is the head of another blob.
    """
    if not name.startswith(f"{folder_of(head.namespace)}/"):
        raise Malformed("it is the pack of another namespace than its name says")
    records = head.records
    fit = (records["length"] == head.page_size) & (records["offset"] <= size) & (records["stored"] <= size)
    fit &= records["offset"] + records["stored"] <= size
    if fit.all() and size == head.total:
        return head
    damaged = head.damaged + max(len(records) - int(fit.sum()), 1)
    records, tails = _only(fit, records, head.tails)
    return msgspec.structs.replace(head, records=records, tails=tails, damaged=damaged)


def with_right_preamble(raw: bytes) -> tuple[bytes, bool]:
    """The pack ``raw`` with its preamble in front that is right, if either is; and whether both are."""
    ends = [_with_preamble(raw, 0), _with_preamble(raw, len(raw) - PREAMBLE_BYTES)]
    right = next((end for end in ends if end), b"")
    return right + raw[len(right) :], all(ends) and ends[0] == ends[1]


def _with_preamble(raw: bytes, at: int) -> bytes:
    """The preamble at ``at`` and the name beside it; nothing when it does not match its checksum."""
    preamble = raw[max(at, 0) : max(at, 0) + PREAMBLE_BYTES]
    if len(preamble) < PREAMBLE_BYTES:
        return b""
    size = _SAID.unpack_from(preamble)[3]
    name = raw[PREAMBLE_BYTES : PREAMBLE_BYTES + size] if not at else raw[max(at - size, 0) : at]
    seed = _PROOF.unpack_from(preamble, _SAID.size)[-1]
    return preamble + name if crc32c(preamble[:-4] + name) == seed else b""
