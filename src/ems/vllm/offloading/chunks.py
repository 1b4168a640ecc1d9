"""What one page of a chunk holds, and which engine blocks belong to which chunk.

A chunk is a run of blocks of one KV cache group; its page is, for each layer of the group, the bytes of these blocks
one after the other, and a trailer.  Brains.  What always holds: a page says from which of its blocks on it is valid
(of a layer that keeps a state, only the last block of a chunk is stored), and nothing is loaded from what comes before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_TRAILER = struct.Struct("<II")
TRAILER_BYTES = _TRAILER.size


class ChunkBlocks(NamedTuple):
    """The engine blocks ``block_ids`` of one chunk; ``first`` is the place of the first of them within it."""

    first: int
    block_ids: list[int]


def chunks_of(block_ids: Sequence[int], index: int, blocks: int) -> list[ChunkBlocks]:
    """``block_ids`` are consecutive in a request from its block ``index`` on; by chunks of ``blocks`` of them."""
    found, at, first = [], 0, index % blocks
    while at < len(block_ids):
        count = min(blocks - first, len(block_ids) - at)
        found.append(ChunkBlocks(first, list(block_ids[at : at + count])))
        at, first = at + count, 0
    return found


def trailer(first: int) -> bytes:
    """The end of a page whose blocks from ``first`` on are valid."""
    return _TRAILER.pack(first, 0)


def valid_from(page: memoryview) -> int:
    """From which of its blocks on a page is valid."""
    first: int = _TRAILER.unpack_from(page, len(page) - TRAILER_BYTES)[0]
    return first
