"""Checksums of pages while these are being filled.

What always holds: a checksum is that of the bytes that were put into the page, or of those that lie there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ems.pool.layout import crc32c

NOTHING = 0xFFFFFFFF
"""The checksum of nothing as :attr:`PageSums.sums` has it: before the last step, which turns all bits over."""


class PageSums:
    """Checksums of ``pages``, each of which is filled from its beginning to its end."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._pages = pages
        self.sums = np.full(len(pages), NOTHING, np.int64)
        """Of what was copied into each of them so far; not yet turned over."""
        self.summed = np.zeros(len(pages), np.int64)
        """How many bytes these are."""
        self.whole = 0
        """How many leading pages are filled."""

    @property
    def done(self) -> list[int]:
        """Those of the leading pages that are whole.  Copies whose sums were not taken have to be over."""
        done: list[int] = (self.sums[: self.whole] ^ NOTHING).tolist()
        for at, (page, summed) in enumerate(zip(self._pages[: self.whole], self.summed.tolist(), strict=False)):
            if summed != len(page):  # some of its bytes were there before, or no sum was taken
                done[at] = crc32c(page)
        return done
