"""What a node knows of a tier, written down so that the next start need not read every pack's head.

A brain.  It is a help only: whoever reads it compares it with what is there, and whatever is damaged is left out.
Packs whose tails are encrypted are not in it, because here they would not be.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from ems.pool.checksum import crc32c
from ems.pool.keys import Tail
from ems.pool.tiers.catalogue import Pack
from ems.pool.tiers.record import RECORD, Head

CATALOGUE = "catalogue.bin"
_MAGIC = b"EMSCAT01"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: int
    used_at: float
    namespace: str
    page_size: int
    pack_id: bytes
    salt: bytes
    stored_at: float
    sealed: bool
    total: int
    records: bytes
    tails: dict[int, Tail]


def pack_snapshot(packs: Iterable[Pack]) -> list[bytes]:
    """The bytes in which ``packs`` are written down."""
    kept = [
        _Kept(
            *(pack.name, pack.size, pack.used_at, pack.head.namespace, pack.head.page_size, pack.head.pack_id),
            *(pack.head.salt, pack.head.stored_at, pack.head.sealed, pack.head.total),
            *(pack.records.tobytes(), pack.head.tails),
        )
        for pack in packs
        if not (pack.head.sealed and pack.head.tails) and not pack.head.damaged
    ]
    body = msgspec.msgpack.encode(kept)
    return [_MAGIC, crc32c(body).to_bytes(4, "little"), body]


def is_snapshot(raw: bytes) -> bool:
    """Whether ``raw`` is what was written."""
    body = memoryview(raw)[12:]
    return raw[:8] == _MAGIC and len(body) > 0 and crc32c(body) == int.from_bytes(raw[8:12], "little")


def unpack_snapshot(raw: bytes) -> dict[str, tuple[int, float, Head]]:
    """Size, last use and head of each pack by name; nothing when ``raw`` is not what was written."""
    if not is_snapshot(raw):
        return {}
    try:
        kept = msgspec.msgpack.decode(memoryview(raw)[12:], type=list[_Kept])
    except msgspec.DecodeError:
        return {}
    return {
        one.name: (one.size, one.used_at, Head(
            *(one.namespace, one.page_size, one.pack_id, one.salt, one.stored_at, one.sealed, one.total),
            *(np.frombuffer(one.records, dtype=RECORD), one.tails, 0),
        ))
        for one in kept
    }  # fmt: skip
