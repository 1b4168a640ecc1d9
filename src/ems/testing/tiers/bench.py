"""What every test of the suite begins with: one place, tiers opened in it, and a look at what is there."""

from __future__ import annotations

from collections.abc import Sequence

from ems.pool.tiers.blobs import Blob, Blobs
from ems.pool.tiers.seam import Outcome, Stored, Tier
from ems.testing.tiers.pages import fetch
from ems.testing.tiers.places import FaultyBlobs


class TierBench:
    """What a test of a tier has at hand: an empty place; opening it twice is a restart, or a node beside the first."""

    def blobs(self) -> Blobs:
        """The place of the running test."""
        raise NotImplementedError  # whoever inherits the suite names the place

    def open(self, blobs: Blobs) -> Tier:
        """A tier in the place ``blobs``."""
        raise NotImplementedError  # whoever inherits the suite opens the kind of tier that is tested

    def opened(self) -> tuple[Tier, FaultyBlobs]:
        """A tier that has looked around, and its place."""
        blobs = FaultyBlobs(self.blobs())
        tier = self.open(blobs)
        tier.maintain()
        return tier, blobs

    def packs(self) -> list[Blob]:
        return [blob for blob in self.blobs().blobs() if blob.name.endswith(".pack")]

    def content(self, blob: Blob) -> bytes:
        raw = memoryview(bytearray(blob.size))
        assert self.blobs().read(blob.name, 0, [raw]) == blob.size
        return bytes(raw)

    def expect(self, tier: Tier, pages: Sequence[Stored]) -> None:
        found = fetch(tier, [one.key for one in pages])
        assert [outcome for outcome, _ in found] == [Outcome.DONE] * len(pages)
        assert [raw for _, raw in found] == [bytes(one.payload) for one in pages]

    def only_right(self, pages: Sequence[Stored], tier: Tier | None = None) -> int:
        """How many of ``pages`` come back; each that does has its bytes."""
        if tier is None:
            tier, _ = self.opened()
        found = fetch(tier, [one.key for one in pages])
        right = [outcome is Outcome.DONE for outcome, _ in found]
        for one, (outcome, raw) in zip(pages, found, strict=True):
            assert outcome is not Outcome.DONE or raw == one.payload, "a wrong byte was served"
        return sum(right)
