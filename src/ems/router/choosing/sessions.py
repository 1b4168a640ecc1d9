"""Which instances serve a conversation, so that its next turn goes where its KV is.  A brain.

What always holds: a session is remembered for ``lifetime`` seconds after its last request, and at most ``capacity`` of
them are, those used last.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

CAPACITY: Final = 1 << 16


class Sessions:
    """The bit (see :class:`~ems.router.choosing.prefix_index.PrefixIndex`) of each session's instance in one role."""

    def __init__(self, lifetime: float, capacity: int = CAPACITY) -> None:
        self._lifetime = lifetime
        self._capacity = capacity
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, session: bytes, now: float) -> int:
        """Return the bit of the session's instance, 0 where there is none any more."""
        bit, until = self._known.get(session, (0, now))
        return bit if now < until else 0

    def keep(self, session: bytes, bit: int, now: float) -> None:
        self._known[session] = (bit, now + self._lifetime)
        self._known.move_to_end(session)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
