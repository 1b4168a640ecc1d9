"""A tier that is slow, hangs or fails when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ems.errors import TierFailed
from ems.pool.keys import Tail
from ems.pool.tiers.seam import ForgetRequest, ForgetResult, Holding, KeyRun, Outcome, Stored, StoredTail, Tier, Wanted
from tests.kit.tiers.places import PATIENCE


class FaultyTier:
    """A tier that does what ``tier`` does until it is told otherwise."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.delay = 0.0
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def _begin(self) -> None:
        self.calls += 1
        if self.delay:
            time.sleep(self.delay)  # the injected latency itself
        if not self.gate.wait(PATIENCE):
            raise TierFailed("the test did not let this call go on")
        if self.failing:
            raise TierFailed("the test lets this tier fail")

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        return self._tier.holds(namespace, keys)

    def tails(self, namespace: str, keys: Sequence[bytes]) -> list[Tail | None]:
        return self._tier.tails(namespace, keys)

    def find_tail(self, namespace: str, tail: Tail) -> StoredTail | None:
        return self._tier.find_tail(namespace, tail)

    def namespaces(self) -> dict[str, Holding]:
        return self._tier.namespaces()

    def left_alone(self) -> set[str]:
        return self._tier.left_alone()

    def recent(self, namespace: str) -> Iterator[KeyRun]:
        return self._tier.recent(namespace)

    def forget(self, meant: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        self._begin()
        return self._tier.forget(meant, dry_run=dry_run)

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        self._begin()
        return self._tier.store(namespace, pages)

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        self._begin()
        return self._tier.load(namespace, wanted)

    def maintain(self, *, probe: bool = False) -> None:
        self._begin()
        self._tier.maintain(probe=probe)

    def figures(self) -> dict[str, Any]:
        return self._tier.figures()

    def close(self) -> None:
        self._tier.close()
