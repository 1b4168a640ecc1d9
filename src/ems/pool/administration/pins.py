"""The work of pinning many pages, or of taking the pins off them, in steps."""

from __future__ import annotations

from ems.pool.administration.passes import STEP
from ems.pool.core.namespaces import NamespacePages
from ems.pool.core.pool_core import PoolCore


class Pinning:
    """Pins ``keys`` of ``namespace`` until ``until``, or takes their pins off (None); ``dry_run`` only counts."""

    def __init__(
        self, core: PoolCore, namespace: NamespacePages, keys: list[bytes], until: float | None, *, dry_run: bool
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._left = keys
        self._until = until
        self._dry_run = dry_run
        self.pages = 0
        self.refused = 0

    def step(self, _now: float) -> bool:
        keys, self._left = self._left[-STEP:], self._left[:-STEP]
        known = map(self._namespace.index.get, keys)
        present = [page.key for page in known if page is not None and page.present]
        if self._until is None:
            pinned = [key for key in keys if key in self._namespace.pins.pinned]
            self.pages += len(pinned) if self._dry_run else self._namespace.pins.unpin(pinned)
        elif self._dry_run:
            self.pages += len(present)
        else:
            count = self._core.pin(self._namespace.number, present, self._until)
            self.pages += count
            self.refused += len(present) - count
        return bool(self._left)

    @property
    def done(self) -> bool:
        return not self._left

    def report(self) -> dict[str, object]:
        return {"pages": self.pages, "refused": self.refused, "pinned": len(self._namespace.pins.pinned)}
