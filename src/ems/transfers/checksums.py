"""Checksums of pages while these are being filled.

What always holds: a checksum is that of the bytes that were put into the page, or of those that lie there.
"""

from __future__ import annotations

import numpy as np

from ems.pool.layout import crc32c
from ems.transfers.plan import Slots

NOTHING = 0xFFFFFFFF
"""The checksum of nothing as :attr:`PageSums.sums` has it: before the last step, which turns all bits over."""


class PageSums:
    """Checksums of the pages in ``slots``, each of which is filled from its beginning to its end."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.sums = np.full(len(slots.starts), NOTHING, np.int64)
        """Of what was copied into each of them so far; not yet turned over."""
        self.summed = np.zeros(len(slots.starts), np.int64)
        """How many bytes these are."""
        self.whole = 0
        """How many leading pages are filled."""

    @property
    def done(self) -> list[int]:
        """Those of the leading pages that are whole.  Copies whose sums were not taken have to be over."""
        done: list[int] = (self.sums[: self.whole] ^ NOTHING).tolist()
        for at in np.flatnonzero(self.summed[: self.whole] != self._slots.size).tolist():
            done[at] = crc32c(self._slots.page(at))  # some of its bytes were there before, or no sum was taken
        return done
