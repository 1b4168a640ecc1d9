"""The pages of a pool as they lie in its files, to be hurt behind the node's back."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from ems.pool.layout import HEADER_BYTES, HEADERS_OFFSET, MAGIC, SlotState, pack_header, unpack_header

_SLOT_COUNT_OFFSET = len(MAGIC) + 8


class StoredPage(NamedTuple):
    """A page that is there: the file it lies in, and where its header begins in that."""

    segment: Path
    header: int

    def overwrite(self) -> None:
        """Let the page's memory belong to another one, as if it had been evicted and used again."""
        with self.segment.open("r+b") as file:
            file.seek(self.header)
            header = unpack_header(file.read(HEADER_BYTES), 0)
            file.seek(self.header)
            file.write(pack_header(header._replace(generation=header.generation + 1)))


def stored_pages(directory: Path) -> list[StoredPage]:
    """All pages that a reader would find."""
    return [page for path in sorted(directory.glob("segment-*")) for page in _pages(path)]


def _pages(path: Path) -> list[StoredPage]:
    with path.open("rb") as file:
        description = file.read(HEADERS_OFFSET)
        if not description.startswith(MAGIC):
            return []
        (slots,) = struct.unpack_from("<I", description, _SLOT_COUNT_OFFSET)
        headers = file.read(slots * HEADER_BYTES)
    return [
        StoredPage(path, HEADERS_OFFSET + offset)
        for offset in range(0, len(headers), HEADER_BYTES)
        if unpack_header(headers, offset)[0] == SlotState.PRESENT
    ]
