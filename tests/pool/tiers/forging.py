"""What somebody without the key makes of a pack: anything, with all checksums right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ems.pool.layout import crc32c
from ems.pool.tiers.pack_format import DATA_ALIGN, PREAMBLE_BYTES, RECORD, head_bytes


def forged(
    raw: bytes,
    *,
    preamble: Callable[[bytearray], None] = lambda _: None,
    body: Callable[[list[Any]], None] = lambda _: None,
    records: Callable[[Any], None] = lambda _: None,
    data: Callable[[bytearray], None] = lambda _: None,
) -> bytes:
    """The pack ``raw`` after changes to its preamble, its body (namespace, size of pages, time), records and bytes."""
    size = head_bytes(raw)
    begin = -(-size // DATA_ALIGN) * DATA_ALIGN
    pages = bytearray(raw[begin : len(raw) - size])
    data(pages)
    fields = msgspec.msgpack.decode(raw[PREAMBLE_BYTES:size])
    body(fields)
    table = np.frombuffer(fields[3], dtype=RECORD).copy()
    records(table)
    for record in table:
        offset, stored = int(record["offset"]), int(record["stored"])
        record["stored_sum"] = crc32c(bytes(pages[offset : offset + stored])) if stored < len(raw) else 0
        record["page_sum"] = record["stored_sum"]
    fields[3] = table.tobytes()
    made = msgspec.msgpack.encode(fields)
    head = bytearray(raw[: PREAMBLE_BYTES - 4])
    head[16:20] = len(made).to_bytes(4, "little")
    preamble(head)
    head += crc32c(bytes(head) + made).to_bytes(4, "little")
    return bytes(head + made).ljust(begin, b"\0") + pages + made + head
