"""What somebody without the key makes of a pack: anything, with all checksums right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ems.pool.checksum import crc32c
from ems.pool.tiers.pack_format import PREAMBLE_BYTES, RECORD

_SUMMED = RECORD.itemsize - 4


def forged(
    raw: bytes,
    *,
    preamble: Callable[[bytearray], None] = lambda _: None,
    records: Callable[[Any], None] = lambda _: None,
    data: Callable[[bytearray], None] = lambda _: None,
) -> bytes:
    """The pack ``raw`` after changes to its preamble and name, its records and its bytes."""
    made = bytearray(raw)
    data(made)
    name, count = int.from_bytes(raw[16:20], "little"), int.from_bytes(raw[24:32], "little")
    head = bytearray(made[: PREAMBLE_BYTES + name])
    preamble(head)
    seed = crc32c(bytes(head[: PREAMBLE_BYTES - 4] + head[PREAMBLE_BYTES:]))
    head[PREAMBLE_BYTES - 4 : PREAMBLE_BYTES] = seed.to_bytes(4, "little")
    start, end = PREAMBLE_BYTES + name, PREAMBLE_BYTES + name + count * RECORD.itemsize
    table = np.frombuffer(bytes(made[start:end]), dtype=RECORD).copy()
    records(table)
    for record in table:
        offset, stored = int(record["offset"]), int(record["stored"])
        record["stored_sum"] = crc32c(bytes(made[offset : offset + stored])) if stored < len(made) else 0
        record["page_sum"] = record["stored_sum"]
        record["own_sum"] = crc32c(record.tobytes()[:_SUMMED], seed)
    made[:start], made[start:end] = head, table.tobytes()
    made[-start:] = head[PREAMBLE_BYTES:] + head[:PREAMBLE_BYTES]
    return bytes(made)
