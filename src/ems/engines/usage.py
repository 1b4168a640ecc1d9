"""Tokens of an answer, out of its bytes as they pass.

Engines say at an answer's end what was used; in a stream only when the client asked for it.  Without that, the events
of a stream are counted: an engine sends about one for each token.  Bytes are looked at, never changed or held back.
"""

from __future__ import annotations

import re
from typing import Final

_TAIL: Final = 4096
"""Bytes at an answer's end in which its use stands."""
_USED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')


class Meter:
    """One answer's.  ``feed`` is on the path of each piece and does as little as it can."""

    __slots__ = ("_before", "_events", "_last")

    def __init__(self) -> None:
        self._events = 0
        self._before = b""
        self._last = b""

    def feed(self, piece: bytes) -> None:
        self._events += piece.count(b"data: ")
        self._before = self._last
        self._last = piece

    def tokens(self) -> int:
        """Tokens as the engine counts them, or else events but the last one, which only says that there are no more."""
        tail = (self._before[-_TAIL:] + self._last)[-_TAIL:]
        used = _USED.findall(tail)
        return int(used[-1]) if used else max(0, self._events - 1)
