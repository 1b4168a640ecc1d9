"""The stored form of pages: a pack, written in one go and never changed, which says what it is and proves it.

::

    0          84     84+n    a multiple of 4096
    | preamble | body | zeros | page 0 | page 1 | ... | body | preamble |

Preamble and body are the head.  The preamble has magic, format version, size of the body, a salt, a seal
(:mod:`ems.pool.tiers.pack_seal`) over itself and the body, and a checksum of all that.  The body (MessagePack) has the
namespace, the size of its pages, the time, a record for each page, and the tails (tokens of pages that are not full),
sealed in one piece.  A record has key, parent, place behind the head, codec, the checksums of the page and of what is
stored, nonce and tag.  The head stands at the end once more, so that damage to either costs no page.  All numbers are
little-endian, all checksums CRC-32C.

What always holds: a head whose checksum is wrong is none; what a head with a :attr:`~Head.seal` says was said by a node
that has the tier's secret; only :func:`open_page` tells who wrote a page.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ems.pool.keys import KEY_BYTES, Tail
from ems.pool.layout import crc32c
from ems.pool.tiers.pack_seal import NONCE_BYTES, TAG_BYTES, PackSeal, SealKeys

MAGIC = b"EMSPACK1"
FORMAT_VERSION = 3
DATA_ALIGN = 4096
MAX_RECORDS = 65536
MAX_HEAD = 64 << 20
FIRST_READ = 32 << 10
"""Bytes of a head that are worth reading at once; the heads of most packs are shorter."""
PACK_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{12}-[0-9a-f]{16}\.pack")
_ENCRYPTED = 1
_TAILS = b"tails"

_SAID = struct.Struct("<8sIII32s")
_PROOF = struct.Struct(f"<{NONCE_BYTES}s{TAG_BYTES}sI")
PREAMBLE_BYTES = _SAID.size + _PROOF.size
RECORD = np.dtype([
    ("key", f"V{KEY_BYTES}"),
    ("parent", f"V{KEY_BYTES}"),
    ("offset", "<u8"),
    ("stored", "<u8"),
    ("codec", "<u4"),
    ("page_sum", "<u4"),
    ("stored_sum", "<u4"),
    ("nonce", f"V{NONCE_BYTES}"),
    ("tag", f"V{TAG_BYTES}"),
])  # fmt: skip

Records = NDArray[np.void]
Buffer = bytes | bytearray | memoryview


class Record(NamedTuple):
    """One element of :data:`RECORD`; ``offset`` counts from the first page, ``stored`` are bytes."""

    key: bytes
    parent: bytes
    offset: int
    stored: int
    codec: int
    page_sum: int
    stored_sum: int
    nonce: bytes
    tag: bytes


class Malformed(ValueError):
    """These bytes are no pack of this format; the text says why."""


class _Body(msgspec.Struct, array_like=True, frozen=True):
    namespace: str
    page_size: int
    stored_at: float
    records: bytes
    tails: bytes
    """Nonce, tag and what is sealed; empty when there are none."""


class Head(msgspec.Struct, frozen=True):
    """What a pack says of itself."""

    namespace: str
    page_size: int
    stored_at: float
    records: Any
    """Array of :data:`RECORD`."""
    tails: dict[int, Tail]
    """By position in ``records``; none without ``seal``."""
    seal: PackSeal | None
    """None when there is no key for it."""
    other_key: bool
    """Whether it was sealed with another key than the one that there is for it."""
    raw: bytes

    @property
    def data(self) -> int:
        """Where the first page is."""
        return -(-len(self.raw) // DATA_ALIGN) * DATA_ALIGN

    @property
    def total(self) -> int:
        """Bytes of the whole pack."""
        return self.data + int(self.records["stored"].sum()) + len(self.raw)

    @property
    def last(self) -> bytes:
        """How it stands at the end of the pack."""
        return self.raw[PREAMBLE_BYTES:] + self.raw[:PREAMBLE_BYTES]

    def around(self, pages: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """The parts of the whole pack: ``pages`` between the head and the head once more."""
        return [self.raw, bytes(self.data - len(self.raw)), *pages, self.last]


def folder_of(namespace: str) -> str:
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
    names = page_names(head.namespace, record.key, record.parent, head.page_size, record.codec)
    return head.seal.open(stored, record.nonce, record.tag, names)


def build_head(
    namespace: str, page_size: int, stored_at: float, records: Records, tails: Mapping[int, Tail], seal: PackSeal
) -> Head:
    """The head of a pack whose pages follow in the order of ``records``; their places are filled in here."""
    records["offset"] = np.cumsum(records["stored"]) - records["stored"]
    sealed = b"".join(seal.seal(msgspec.msgpack.encode(dict(tails)), _TAILS)) if tails else b""
    body = msgspec.msgpack.encode(_Body(namespace, page_size, stored_at, records.tobytes(), sealed))
    said = _SAID.pack(MAGIC, FORMAT_VERSION, _ENCRYPTED * seal.encrypts, len(body), seal.salt)
    nonce, tag, _ = seal.seal(b"", said + body)
    raw = said + _PROOF.pack(nonce, tag, crc32c(said + nonce + tag + body)) + body
    return Head(namespace, page_size, stored_at, records, dict(tails), seal, other_key=False, raw=raw)


def head_bytes(start: Buffer) -> int:
    """How many bytes the head has whose first :data:`PREAMBLE_BYTES` are ``start``.

    Raises Malformed: they begin no pack of this format.
    """
    if len(start) < PREAMBLE_BYTES:
        raise Malformed(f"{len(start)} bytes, expected a pack of at least {PREAMBLE_BYTES}")
    magic, version, _, body, _ = _SAID.unpack_from(start)
    if magic != MAGIC:
        raise Malformed("it does not begin like a pack")
    if version != FORMAT_VERSION:
        raise Malformed(f"format version {version}, this release reads {FORMAT_VERSION}")
    if body > MAX_HEAD:
        raise Malformed("its head is damaged")
    return PREAMBLE_BYTES + int(body)


def parse_head(raw: Buffer, name: str, keys: SealKeys | None) -> Head:
    """What the head ``raw`` (at least :func:`head_bytes`) says of the pack that is called ``name``.

    Raises Malformed: it is no head, or not whole, or damaged, or that of another namespace.
    """
    size = head_bytes(raw)
    if len(raw) < size:
        raise Malformed(f"{len(raw)} bytes of a head of {size}, the rest is missing")
    raw = bytes(raw[:size])
    _, _, flags, _, salt = _SAID.unpack_from(raw)
    nonce, tag, checksum = _PROOF.unpack_from(raw, _SAID.size)
    if crc32c(raw[: PREAMBLE_BYTES - 4] + raw[PREAMBLE_BYTES:]) != checksum:
        raise Malformed("its head is damaged")
    try:
        body = msgspec.msgpack.decode(raw[PREAMBLE_BYTES:], type=_Body)
        records = np.frombuffer(body.records, dtype=RECORD)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed("its head makes no sense") from error
    if not name.startswith(f"{folder_of(body.namespace)}/"):
        raise Malformed("it is the pack of another namespace than its name says")
    # Nobody is expected to have the key of packs that are encrypted.
    seal = keys.pack(body.namespace, salt) if keys is not None and (keys.encrypts or not flags & _ENCRYPTED) else None
    sealed = raw[: _SAID.size] + raw[PREAMBLE_BYTES:]
    other_key = seal is not None and seal.open(b"", nonce, tag, sealed) is None
    seal = None if other_key else seal
    tails = {} if seal is None else _open_tails(body.tails, seal)
    return Head(body.namespace, body.page_size, body.stored_at, records, tails, seal, other_key, raw)


def _open_tails(raw: bytes, seal: PackSeal) -> dict[int, Tail]:
    nonce, tag, sealed = raw[:NONCE_BYTES], raw[NONCE_BYTES:][:TAG_BYTES], raw[NONCE_BYTES + TAG_BYTES :]
    opened = seal.open(sealed, nonce, tag, _TAILS) if raw else None
    return {} if opened is None else msgspec.msgpack.decode(opened, type=dict[int, Tail])


def find_head(read: Callable[[int, int], bytes], size: int, name: str, keys: SealKeys | None) -> tuple[Head, bool]:
    """The head of the pack ``name`` of ``size`` bytes, and whether it stands in front and agrees with the size.

    ``read(offset, count)`` gets bytes of the pack, fewer at its end.

    Raises Malformed: neither what is in front nor what is at the end is a head, with what is wrong with the first.
    """
    try:
        start = read(0, min(FIRST_READ, size))
        if (more := min(head_bytes(start), size) - len(start)) > 0:
            start += read(len(start), more)
        head = parse_head(start, name, keys)
    except Malformed as error:
        last = read(max(size - PREAMBLE_BYTES, 0), PREAMBLE_BYTES)
        try:
            length = min(head_bytes(last), size)
            return parse_head(last + read(size - length, length - PREAMBLE_BYTES), name, keys), False
        except Malformed:
            raise error from None
    return head, head.total == size
