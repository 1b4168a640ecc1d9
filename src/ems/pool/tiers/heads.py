"""Packs as blobs: what they are called, and how their heads are read and judged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import msgspec

from ems.pool.tiers.blobs import Blob, Blobs
from ems.pool.tiers.record import PREAMBLE_BYTES, Head, Malformed, head_bytes, parse_head

PACK_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{12}-[0-9a-f]{16}\.pack")
FIRST_READ = 32 << 10
"""Bytes of a head that are read at once; the heads of most packs are shorter."""

Unseal = Callable[[bytes, str, bytes], bytes | None]
"""Opens tails: ``(sealed, namespace, salt)``; None where it cannot."""


def folder_of(namespace: str) -> str:
    """Where the packs of ``namespace`` are."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def pack_name(namespace: str, now: float, unique: str) -> str:
    """What a pack is called that is written ``now``; ``unique`` is 16 random hex digits."""
    return f"{folder_of(namespace)}/{int(now * 1000):012x}-{unique}.pack"


def read_head(blobs: Blobs, blob: Blob, unseal: Unseal) -> Head:
    """The head of the pack ``blob``, without pages that do not lie in it.

    Raises:
        Gone: the blob vanished.
        Malformed: it is no pack, or one of another place.
    """
    if blob.size < PREAMBLE_BYTES:
        raise Malformed(f"{blob.size} bytes, expected a pack of at least {PREAMBLE_BYTES}")
    raw = bytearray(min(FIRST_READ, blob.size))
    read = blobs.read(blob.name, 0, [memoryview(raw)])
    size = head_bytes(memoryview(raw)[:read])
    if size > len(raw):
        if size > blob.size:
            raise Malformed(f"{blob.size} bytes, its head alone has {size}")
        more = bytearray(size - len(raw))
        read += blobs.read(blob.name, len(raw), [memoryview(more)])
        raw += more
    head = parse_head(bytes(memoryview(raw)[:read]), unseal)
    if not blob.name.startswith(f"{folder_of(head.namespace)}/"):
        raise Malformed("it is the pack of another namespace than its name says")
    return within(head, blob.size)


def within(head: Head, size: int) -> Head:
    """``head`` without pages that do not lie whole in ``size`` bytes, or are not of the namespace's size."""
    records = head.records
    fit = (records["length"] == head.page_size) & (records["offset"] + records["stored"] <= size)
    if fit.all() and size == head.total:
        return head
    kept = [position for position in range(len(records)) if fit[position]]
    tails = {new: head.tails[old] for new, old in enumerate(kept) if old in head.tails}
    damaged = head.damaged + max(len(records) - len(kept), 1)
    return msgspec.structs.replace(head, records=records[fit], tails=tails, damaged=damaged)


def read_whole(blobs: Blobs, name: str, most: int = 1 << 30) -> bytes:
    """All bytes of a blob, at most ``most``.

    Raises:
        Gone: there is none of that name.
    """
    found = bytearray()
    step = 1 << 20
    while len(found) < most:
        piece = bytearray(step)
        count = blobs.read(name, len(found), [memoryview(piece)])
        found += piece[:count]
        if count < step:
            break
    return bytes(found)
