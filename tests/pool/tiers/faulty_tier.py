"""A tier that is slow, hangs or fails when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ems.errors import TierFailed
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Outcome, Stored, Wanted
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers.places import PATIENCE


class FaultyTier(PackTier):
    """A tier that works until it is told otherwise."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
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

    def forget(self, request: ForgetRequest, *, dry_run: bool = False) -> ForgetResult:
        self._begin()
        return super().forget(request, dry_run=dry_run)

    def store(self, namespace: str, pages: Sequence[Stored]) -> list[Outcome]:
        self._begin()
        return super().store(namespace, pages)

    def load(self, namespace: str, wanted: Sequence[Wanted]) -> list[Outcome]:
        self._begin()
        return super().load(namespace, wanted)

    def maintain(self) -> None:
        self._begin()
        super().maintain()

    def probe(self) -> None:
        self._begin()
        super().probe()
