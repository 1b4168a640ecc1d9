"""Which pages a medium below memory was said to have (KV events), so that it is said when one has left it.

A brain.  Pages leave a tier in many ways: others make room, they grow old, somebody clears, a cluster evicts them on
its own.  So nobody tells of that: what was told of is looked for again, a few pages each time.  What always holds: what
was told of as stored is told of as removed once it is not there any more, or cannot be remembered; memory is bounded by
:data:`MOST_PAGES`; nothing is remembered while nobody asks for changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ems.pool.core.changes import ChangeLog
from ems.pool.media import named

MOST_PAGES = 65536
LOOKED_AT = 512
"""Pages that are looked for in one go."""
AGAIN_SECONDS = 30.0
"""Pages that are heard of again after so long are told of again: an engine may ask that did not before."""

Held = Callable[[str, bytes, float], bool]
"""Whether a page of a namespace is there, of which was last heard at that time."""


class TierEvents:
    """KV events of the pages of ``medium``."""

    def __init__(self, changes: ChangeLog, medium: str, held: Held) -> None:
        self._changes = changes
        self._medium = medium
        self._held = held
        self._heard: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        """When each was last told of; those that were not looked for longest come first."""

    def seen(self, namespace: str, keys: Sequence[bytes], now: float) -> None:
        """A tier of the medium has ``keys``."""
        if not self._changes.recording():
            self._heard.clear()
            return
        new = [key for key in keys if now - self._heard.get((namespace, key), -math.inf) >= AGAIN_SECONDS]
        self._heard.update(((namespace, key), now) for key in new)
        if new:
            self._changes.stored(named(namespace, self._medium), new)
        while len(self._heard) > MOST_PAGES:
            self._take_back(next(iter(self._heard)))

    def missed(self, namespace: str, keys: Sequence[bytes]) -> None:
        """A tier of the medium turned out not to have some of ``keys``; another one may."""
        for key in keys:
            if (namespace, key) in self._heard and not self._held(namespace, key, -math.inf):
                self._take_back((namespace, key))

    def forget(self, namespace: str) -> None:
        """What the medium has of ``namespace`` is being cleared, and nobody will know how far."""
        for page in [page for page in self._heard if page[0] == namespace]:
            self._take_back(page)

    def look(self) -> None:
        """Look for some of them again."""
        if not self._changes.recording():
            self._heard.clear()
        for _ in range(min(LOOKED_AT, len(self._heard))):
            page, heard = next(iter(self._heard.items()))
            if self._held(*page, heard):
                self._heard.move_to_end(page)
            else:
                self._take_back(page)

    def _take_back(self, page: tuple[str, bytes]) -> None:
        del self._heard[page]
        self._changes.removed(named(page[0], self._medium), page[1])
