"""How a client looks at pages in mapped memory: are they the ones that it was promised, and are their bytes right.

What always holds: a page counts only if its segment belongs to the namespace that was asked for, its header has the
generation and the key of the promise and says the same before and after the copy, and, where the bytes are to be
checked, these match the header's checksum.  They are always checked of a page from before the node's last start, or
from a slower tier; of the others all are where that is ``always``, and one in :data:`SAMPLE` where it is ``sampled``,
which finds memory that goes bad after a few loads and costs a twentieth.

All headers of a load are looked at in one go: a long prompt has thousands, and the engine needs the interpreter, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np

from ems.pool.keys import KEY_BYTES
from ems.pool.layout import (
    HEADER,
    HEADERS_OFFSET,
    RAW_HEADER,
    Array,
    PageFlag,
    PageRef,
    SlotState,
    belongs_to,
    carve,
    carving_of,
    crc32c,
    headers_are_sound,
    namespace_digest,
    slot_offset,
)

LOOKED_AT_ONCE = 1 << 20
"""Bytes of a page that the node looks at in one step."""
SAMPLE = 16
"""Of so many pages that were stored in this life of the node one is checked when pages are sampled."""
_NO_CHECKSUM = -1
"""Of a page whose header is damaged or names another length: no bytes have it."""


class Verify(StrEnum):
    """When the bytes of a page are checked that was stored since the node started."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Trust(msgspec.Struct, frozen=True):
    """What a node says about its pages: its policy, and the first stamp since it started."""

    policy: Verify = Verify.SAMPLED
    since: int = 0

    def due(self, headers: Array, loaded: Array) -> Array:
        """Which pages of ``headers``, the ``loaded``-th that are looked at, are to be checked."""
        flags = headers["flags"]
        due = (headers["stamp"] < self.since) | (flags & int(PageFlag.FROM_BELOW) != 0)
        if self.policy is not Verify.NEVER:
            due |= loaded % (SAMPLE if self.policy is Verify.SAMPLED else 1) == 0
        checked: Array = due & (flags & int(PageFlag.CHECKSUMMED) != 0)
        return checked


def policy_named(name: str) -> Verify:
    """The policy that a node names; sampling where this release does not know it."""
    return Verify(name) if name in set(Verify) else Verify.SAMPLED


class LeasedPages(NamedTuple):
    """Pages that were promised; the ``present`` leading ones were there when they were looked at.

    ``headers`` is what these said then, ``starts`` are the addresses of their slots in ``segments``, and ``checksums``
    those that the bytes of some must have, by position.
    """

    refs: Array
    keys: bytes
    present: int
    headers: Array
    starts: Array
    segments: Sequence[memoryview]
    checksums: dict[int, int]

    def ref(self, at: int) -> PageRef:
        return PageRef._make(self.refs[at].tolist())

    def key(self, at: int) -> bytes:
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]


class PageReader:
    """Pages of the namespace ``name``, of ``page_size`` bytes each, in memory that ``segment`` maps by number.

    Of pages that are sampled it begins to count at ``first``: readers that see a few pages each find something, too.
    """

    def __init__(
        self, segment: Callable[[int], memoryview], name: str, page_size: int, trust: Trust, first: int = 0
    ) -> None:
        self._segment = segment
        self._digest = namespace_digest(name)
        self._page_size = page_size
        self._trust = trust
        self._carvings: dict[int, int] = {}
        self._looked_at = first
        self.corrupt: list[tuple[bytes, PageRef]] = []
        """Keys and places of pages with wrong bytes or a strange header, to be reported to the node."""

    def page(self, ref: PageRef) -> memoryview:
        segment = self._segment(ref.segment)
        begin = slot_offset(len(segment), self._page_size, ref.slot)
        return segment[begin : begin + self._page_size]

    def look(self, packed_refs: bytes, keys: bytes) -> LeasedPages:
        """Which leading slots of ``packed_refs`` hold the whole committed pages of ``keys``, and what says so.

        The first that does not was promised a moment ago: the node shall look at its header.
        """
        refs = np.frombuffer(packed_refs, "<u4").reshape(-1, len(PageRef._fields))
        headers, starts, segments = self._headers(refs)
        there = (
            (headers["state"] == int(SlotState.PRESENT))
            & (headers["generation"] == refs[:, 2])
            & (headers["key"] == np.frombuffer(keys, headers["key"].dtype))
        )
        count = len(refs) if there.all() else int(there.argmin())
        headers = headers[:count]
        whole = headers_are_sound(headers)
        # A header that is damaged itself may say of a damaged page that it has no checksum.
        due = ~whole | self._trust.due(headers, self._looked_at + 1 + np.arange(count))
        self._looked_at += count
        right = np.where(
            whole & (headers["length"] == self._page_size), headers["checksum"].astype(np.int64), _NO_CHECKSUM
        )
        at = np.flatnonzero(due)
        checksums = dict(zip(at.tolist(), right[at].tolist(), strict=True))
        pages = LeasedPages(refs, keys, count, headers, starts, segments, checksums)
        if count < len(refs):
            self._suspect(pages, count)
        return pages

    def _headers(self, refs: Array) -> tuple[Array, Array, list[memoryview]]:
        """Headers of the slots ``refs``, zeros of those that the namespace has not; where slots begin, and in what."""
        headers, starts = np.zeros(len(refs), HEADER), np.zeros(len(refs), np.int64)
        segments = []
        for number in np.unique(refs[:, 0]).tolist():
            segment = self._segment(number)
            geometry = carve(len(segment), self._page_size)
            table = np.frombuffer(segment, RAW_HEADER, geometry.slot_count, HEADERS_OFFSET)
            mine = np.flatnonzero((refs[:, 0] == number) & (refs[:, 1] < len(table)))
            found = table[refs[mine, 1]].view(HEADER)
            if self._is_ours(number, segment):
                headers[mine] = found
                starts[mine] = table.ctypes.data - HEADERS_OFFSET + geometry.slot_offset(refs[mine, 1].astype(np.int64))
                segments.append(segment)
        return headers, starts, segments

    def _is_ours(self, number: int, segment: memoryview) -> bool:
        """Whether the segment is the namespace's; looked at again when it was carved anew."""
        carving = carving_of(segment)
        if self._carvings.get(number) != carving:
            if not belongs_to(segment, self._digest):
                return False
            self._carvings[number] = carving
        return True

    def _suspect(self, pages: LeasedPages, at: int) -> None:
        self.corrupt.append((pages.key(at), pages.ref(at)))

    def sound(self, pages: LeasedPages, begin: int, end: int) -> int:
        """Where the first page of ``[begin, end)`` is whose bytes are not right, as far as it is time to look at them.

        For the moment after they were copied: they are in the processor's cache then.
        """
        for at in range(begin, end):
            if at in pages.checksums and not self._matches(pages, at):
                if self.same(pages, at, at + 1) > at:  # else it has changed hands underneath, which is nobody's fault
                    self._suspect(pages, at)
                return at
        return end

    def _matches(self, pages: LeasedPages, at: int) -> bool:
        checksum = pages.checksums[at]
        return checksum != _NO_CHECKSUM and crc32c(self.page(pages.ref(at))) == checksum

    def same(self, pages: LeasedPages, begin: int, end: int) -> int:
        """Where the first page of ``[begin, end)`` is whose header is another than when it was looked at."""
        headers, _, _ = self._headers(pages.refs[begin:end])
        same = headers.view(RAW_HEADER) == pages.headers[begin:end].view(RAW_HEADER)
        return end if same.all() else begin + int(same.argmin())
