"""Checksums of pages while these are being filled: of bytes that are still in the processor's cache.

What always holds: a checksum is that of the page's bytes as they lie in the slot, each of them looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ems.pool.layout import crc32c


class PageSums:
    """Checksums of ``pages``, which are filled one after the other and each from its beginning."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._pages = pages
        self.done: list[int] = []
        """Those of the leading pages that are whole."""
        self._value = self._end = 0
        """The checksum of the page behind these, as far as it was looked at."""

    def add(self, whole: int, filled: int) -> None:
        """The ``whole`` leading pages are filled, and ``filled`` bytes of the one behind them."""
        while len(self.done) < whole:
            page = self._pages[len(self.done)]
            self.done.append(crc32c(page[self._end :] if self._end else page, self._value))
            self._value = self._end = 0
        if filled > self._end:
            self._value = crc32c(self._pages[whole][self._end : filled], self._value)
            self._end = filled
