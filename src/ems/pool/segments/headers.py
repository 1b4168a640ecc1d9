"""What stands in segments beside the pages: the description of each, and a header for each slot.

What always holds: only the node writes them; a segment's description is there only while all its headers mean what it
says; no stamp and no carving is given twice, nor one that was not announced before
(:mod:`ems.pool.segments.side_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count, repeat

from ems.pool.keys import NO_PARENT
from ems.pool.layout import (
    HEADER_BYTES,
    Description,
    Header,
    PageFlag,
    PageRef,
    SlotState,
    Writer,
    crc32c,
    header_bytes,
    header_is_sound,
    header_offset,
    pack_description,
    pack_header,
    slot_offset,
    unpack_header,
    unpack_ref,
)
from ems.pool.pages import Assigned, Page
from ems.pool.segments.reader import LOOKED_AT_ONCE
from ems.pool.segments.segment_file import SegmentFile

_FREE = int(SlotState.FREE).to_bytes(4, "little")


class Headers:
    """Descriptions and headers in ``files``, which are the arena's and change with it.

    ``cover`` is fields of the largest stamp and carving before they are given.
    """

    def __init__(self, node_id: bytes, files: Sequence[SegmentFile], cover: Callable[[int, int], None]) -> None:
        self._node_id = node_id
        self._files = files
        self._cover = cover
        self.stamp = 1
        """The stamp of the next page that is committed."""
        self.carving = 1
        """The number of the next description that is written."""
        self.ends: list[int] = []

    def describe(self, assigned: Assigned) -> None:
        """Write a segment's description and clear its slot headers, the old ones too.

        An old header in what becomes the bytes of a page would go on vouching for the page that was there.
        """
        file, geometry = self._files[assigned.segment], assigned.geometry
        end = header_offset(geometry.slot_count)
        stale = max(end, self.ends[assigned.segment])
        # Without a description while it changes: what is half done is not to be read by a node that comes after.
        file.write(0, bytes(stale))
        self.ends[assigned.segment] = end
        carving, self.carving = self.carving, self.carving + 1
        self._cover(self.stamp, self.carving)
        description = pack_description(
            Description(assigned.segment, assigned.namespace, self._node_id, geometry, carving, assigned.generation)
        )
        file.write(0, description)

    def begin_writing(self, pages: Sequence[Page], length: int, writer: Writer) -> None:
        """Write the headers of ``pages`` of ``length`` bytes, before ``writer`` learns of them.

        A node that comes after this one reads there who may still be writing.
        """
        # While a slot is being written these say by whom.
        fields = repeat((writer.pack(), 0, writer.pid_namespace))
        self._write_headers(SlotState.WRITING, pages, fields, length, 0)

    def publish(
        self, pages: Sequence[Page], length: int, checksums: Sequence[int] | None = None, flags: int = 0
    ) -> None:
        """Say in their headers that ``pages`` of ``length`` bytes, in the order of their blocks, are whole."""
        # The first is the most recently used: a prefix is worth more than what hangs on it.
        stamp = self.stamp = self.stamp + len(pages)
        self._cover(stamp, self.carving)
        if checksums is not None:
            flags |= PageFlag.CHECKSUMMED
        parents = [page.parent.key if page.parent is not None else NO_PARENT for page in pages]
        fields = zip(parents, count(stamp - 1, -1), repeat(0) if checksums is None else checksums, strict=False)
        self._write_headers(SlotState.PRESENT, pages, fields, length, int(flags))

    def _write_headers(
        self, state: SlotState, pages: Sequence[Page], fields: Iterable[tuple[bytes, int, int]], length: int, flags: int
    ) -> None:
        """Write the headers of ``pages`` in their order, those of slots side by side in one go.

        Of each parent, stamp and checksum are ``fields``, or what stands in their place.
        """
        before, first = -1, 0
        run: list[bytes] = []
        number = int(state)
        for page, (parent, stamp, checksum) in zip(pages, fields, strict=False):
            segment, slot, generation = unpack_ref(page.ref)
            if run and (slot != first + len(run) or segment != before):
                self._files[before].write(header_offset(first), b"".join(run))
                run = []
            if not run:
                before, first = segment, slot
            run.append(header_bytes(number, generation, page.key, parent, stamp, length, checksum, flags))
        if run:
            self._files[before].write(header_offset(first), b"".join(run))

    def forget(self, slots: Iterable[tuple[int, int]]) -> None:
        """Say in the headers of ``slots`` (segment, number) that they are free.

        That needs no checksum: what remains of such a header means nothing but its generation.
        """
        for segment, slot in slots:
            self._files[segment].write(header_offset(slot), _FREE)

    def look_at(self, ref: PageRef, key: bytes, length: int) -> Generator[None, None, bool]:
        """Whether header and bytes of a present page of ``length`` bytes are right, a part of them in each step."""
        header = self._header(ref)
        if header is None or (*header[:3], header.length) != (SlotState.PRESENT, ref.generation, key, length):
            return False
        if not header.flags & PageFlag.CHECKSUMMED:
            return True
        checksum, file = 0, self._files[ref.segment]
        begin = slot_offset(file.size, length, ref.slot)
        for start in range(0, length, LOOKED_AT_ONCE):
            if start:
                yield
            part = file.read(begin + start, min(LOOKED_AT_ONCE, length - start))
            if part is None:
                return False
            checksum = crc32c(part, checksum)
        return checksum == header.checksum

    def quarantine(self, ref: PageRef, key: bytes) -> None:
        header = pack_header(Header(SlotState.QUARANTINED, ref.generation, key))
        self._files[ref.segment].write(header_offset(ref.slot), header)

    def checksum(self, ref: PageRef) -> int | None:
        """The checksum that the writer of a present page gave; None where it gave none.

        -1, which no bytes have, where its header is damaged: it may say that there is none.
        """
        header = self._header(ref)
        if header is None:
            return -1
        return header.checksum if header.flags & PageFlag.CHECKSUMMED else None

    def _header(self, ref: PageRef) -> Header | None:
        """What is in a slot's header; None where that is damaged."""
        raw = self._files[ref.segment].read(header_offset(ref.slot), HEADER_BYTES)
        return unpack_header(raw, 0) if raw is not None and header_is_sound(raw, 0) else None
