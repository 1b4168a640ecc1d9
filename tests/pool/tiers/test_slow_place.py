"""A place that is slower than what one call may take: each call gets something done, so that all of it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ems.pool.tiers.answers import ForgetRequest
from ems.pool.tiers.blobs import Blob
from ems.pool.tiers.pack_store import SCAN_SECONDS
from ems.pool.tiers.packs import FORGET_SECONDS, PackTier
from tests.kit.tiers import KEYS, NAMESPACE, chain
from tests.pool.tiers.memory_blobs import MemoryBlobs


class Slow(MemoryBlobs):
    """A place where each call, and each blob that is listed, takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 1e9

    def clock(self) -> float:
        return self.now

    def blobs(self) -> Iterator[Blob]:
        for blob in super().blobs():
            self.now += self.seconds
            yield blob

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        self.now += self.seconds
        return super().read(name, offset, into)

    def delete(self, names: Sequence[str]) -> None:
        self.now += self.seconds
        super().delete(names)

    def filled(self, packs: int) -> Slow:
        writer = PackTier("writer", self, KEYS, clock=self.clock)
        for number in range(packs):
            writer.store(NAMESPACE, chain(str(number), 2))
        return self


@pytest.mark.parametrize("seconds", [SCAN_SECONDS / 10, 2 * SCAN_SECONDS])
def test_all_packs_are_learned_however_long_listing_them_takes(seconds: float) -> None:
    place = Slow(seconds).filled(30)
    tier = PackTier("slow", place, KEYS, clock=place.clock)
    for _ in range(30):
        tier.maintain()
    assert tier.figures()["scanned"]
    assert tier.figures()["pages"] == 60


@pytest.mark.parametrize("spared", [0, 3])
def test_all_that_is_meant_is_forgotten_however_long_one_piece_takes(spared: int) -> None:
    place = Slow(2 * FORGET_SECONDS).filled(5)
    tier = PackTier("slow", place, KEYS, clock=place.clock)
    while not tier.figures()["scanned"]:
        tier.maintain()
    meant = ForgetRequest(NAMESPACE, 0.0, frozenset(chain(str(number), 1)[0].key for number in range(spared)))
    calls = 1
    while tier.forget(meant).more:
        calls += 1
        assert calls <= 10, "there is always more"
    assert tier.figures()["pages"] == spared
    assert sum(name.endswith(".pack") for name in place.contents) == spared
