"""How long requests took a node and how many bytes were saved and loaded through it, for its metrics."""

from __future__ import annotations

from collections.abc import Iterable

from ems.histogram import Histogram

SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1, 1.0)
BYTES = tuple(float(4**power) for power in range(6, 17))
"""From 4 KiB to 4 GiB."""


class Measured:
    """The histograms of one node: of each of ``messages``, of each commit and of each lookup that got a lease."""

    def __init__(self, messages: Iterable[type]) -> None:
        self.seconds = {message: Histogram(SECONDS) for message in messages}
        self.saved_bytes = Histogram(BYTES)
        self.loaded_bytes = Histogram(BYTES)
