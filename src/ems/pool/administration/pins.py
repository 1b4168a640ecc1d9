"""The work of pinning many pages, or of taking the pins off them, in steps."""

from __future__ import annotations

from typing import Protocol

from ems.pool.administration.passes import STEP
from ems.pool.core.namespaces import NamespacePages


class Keeper(Protocol):
    """What the pass needs of the pool."""

    def pin(self, namespace: int, keys: list[bytes], until: float) -> int:
        """Those of ``keys`` that are present stay until then; returns how many."""

    def unpin(self, namespace: int, keys: list[bytes]) -> int:
        """End the pins of ``keys``; returns how many there were."""


class Pinning:
    """Pins ``keys`` of ``namespace`` until ``until``, or takes their pins off (None); ``dry_run`` only counts."""

    def __init__(
        self, keeper: Keeper, namespace: NamespacePages, keys: list[bytes], until: float | None, *, dry_run: bool
    ) -> None:
        self._keeper = keeper
        self._namespace = namespace
        self._left = keys
        self._until = until
        self._dry_run = dry_run
        self.pages = 0
        self.refused = 0

    def step(self, _now: float) -> bool:
        """Go on; whether there is something to be done right away."""
        keys, self._left = self._left[-STEP:], self._left[:-STEP]
        known = map(self._namespace.index.get, keys)
        present = [page.key for page in known if page is not None and page.present]
        if self._until is None:
            pinned = [key for key in keys if key in self._namespace.pins.pinned]
            self.pages += len(pinned) if self._dry_run else self._keeper.unpin(self._namespace.number, pinned)
        elif self._dry_run:
            self.pages += len(present)
        else:
            count = self._keeper.pin(self._namespace.number, present, self._until)
            self.pages += count
            self.refused += len(present) - count
        return bool(self._left)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be done."""
        return not self._left

    def report(self) -> dict[str, object]:
        """How far it is."""
        return {"pages": self.pages, "refused": self.refused, "pinned": len(self._namespace.pins.pinned)}
