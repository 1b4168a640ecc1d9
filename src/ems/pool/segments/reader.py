"""How a client looks at pages in mapped memory: are they the ones that it was promised, and are their bytes right.

What always holds: a page counts only if its segment belongs to the namespace that was asked for, its header has the
generation and the key of the promise, and, where the bytes are to be checked, these match the header's checksum.  They
are always checked of a page from before the node's last start, or from a slower tier; of the others all are where that
is ``always``, and one in :data:`SAMPLE` where it is ``sampled``, which finds memory that goes bad after a few loads and
costs a twentieth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import chain

import msgspec
import numpy as np

from ems.pool.layout import (
    HEADER_BYTES,
    HEADERS_OFFSET,
    Header,
    PageFlag,
    PageRef,
    SlotState,
    belongs_to,
    carving_of,
    crc32c,
    header_is_sound,
    header_offset,
    namespace_digest,
    slot_offset,
    unpack_header,
    vouches,
)

LOOKED_AT_ONCE = 1 << 20
"""Bytes of a page that the node looks at in one step."""
SAMPLE = 16
"""Of so many pages that were stored in this life of the node one is checked when pages are sampled."""
_CHECKSUMMED, _FROM_BELOW = int(PageFlag.CHECKSUMMED), int(PageFlag.FROM_BELOW)
"""As plain numbers: flags of an enumeration cost a microsecond a page."""


class Verify(StrEnum):
    """When the bytes of a page are checked that was stored since the node started."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Trust(msgspec.Struct, frozen=True):
    """What a node says about its pages: its policy, and the first stamp since it started."""

    policy: Verify = Verify.SAMPLED
    since: int = 0

    def due(self, header: Header, loaded: int) -> bool:
        """Whether the page of ``header`` is to be checked, the ``loaded``-th that is looked at."""
        flags = header.flags
        if not flags & _CHECKSUMMED:
            return False
        if header.stamp < self.since or flags & _FROM_BELOW:
            return True
        return self.policy is Verify.ALWAYS or (self.policy is Verify.SAMPLED and loaded % SAMPLE == 0)


def policy_named(name: str) -> Verify:
    """The policy that a node names; sampling where this release does not know it."""
    return Verify(name) if name in set(Verify) else Verify.SAMPLED


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

    def holds(self, ref: PageRef, key: bytes) -> bool:
        """Whether the slot of ``ref`` holds, at this moment, the whole committed page of ``key`` of this namespace."""
        segment = self._segment(ref.segment)
        return vouches(segment, ref.slot, ref.generation, key) and self._is_ours(ref.segment, segment)

    def leading(self, refs: Sequence[PageRef], keys: Sequence[bytes]) -> int:
        """Of how many leading ones of ``refs`` :meth:`holds` says yes; in one go, for a long prompt has thousands."""
        if not refs:
            return 0
        columns = np.fromiter(chain.from_iterable(refs), "<u4").reshape(-1, len(PageRef._fields))
        # The beginning of a header, see vouches().
        wanted = np.empty((len(refs), 8 + len(keys[0])), np.uint8)
        wanted[:, :8].view("<u4")[:] = [SlotState.PRESENT, 0]
        wanted[:, 4:8] = np.ascontiguousarray(columns[:, 2:]).view(np.uint8)
        wanted[:, 8:] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(refs), -1)
        good = np.zeros(len(refs), dtype=bool)
        for number in np.unique(columns[:, 0]).tolist():
            segment = self._segment(number)
            if self._is_ours(number, segment):
                headers = np.frombuffer(segment, np.uint8, offset=HEADERS_OFFSET)
                headers = headers[: len(headers) // HEADER_BYTES * HEADER_BYTES].reshape(-1, HEADER_BYTES)
                mine = np.flatnonzero((columns[:, 0] == number) & (columns[:, 1] < len(headers)))
                good[mine] = (headers[columns[mine, 1], : wanted.shape[1]] == wanted[mine]).all(axis=1)
        return len(refs) if good.all() else int(good.argmin())

    def _is_ours(self, number: int, segment: memoryview) -> bool:
        """Whether the segment is the namespace's; looked at again when it was carved anew."""
        carving = carving_of(segment)
        if self._carvings.get(number) != carving:
            if not belongs_to(segment, self._digest):
                return False
            self._carvings[number] = carving
        return True

    def suspect(self, ref: PageRef, key: bytes) -> None:
        """The page was promised a moment ago and :meth:`holds` says no: the node shall look at its header."""
        self.corrupt.append((key, ref))

    def sound(self, ref: PageRef, key: bytes) -> bool:
        """Like :meth:`holds`, and the bytes are right, where it is time to look at them.

        For the moment after they were copied: they are in the processor's cache then.
        """
        segment, at = self._segment(ref.segment), header_offset(ref.slot)
        raw = bytes(segment[at : at + HEADER_BYTES])
        if not vouches(raw, 0, ref.generation, key, headers=0) or not self._is_ours(ref.segment, segment):
            return False
        header, whole = unpack_header(raw, 0), header_is_sound(raw, 0)
        self._looked_at += 1
        # A header that is damaged itself may say of a damaged page that it has no checksum.
        if whole and not self._trust.due(header, self._looked_at):
            return True
        if whole and header.length == self._page_size and crc32c(self.page(ref)) == header.checksum:
            return True
        if self.holds(ref, key):  # else it has changed hands underneath, which is nobody's fault
            self.corrupt.append((key, ref))
        return False
