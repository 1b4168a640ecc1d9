"""What every test of the suite begins with: one place, tiers opened in it, and pages.

A page has a name; equal names have equal bytes, each time.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

from ems.pool.keys import NO_PARENT
from ems.pool.tiers.answers import ForgetRequest, ForgetResult, Outcome, Stored, Wanted
from ems.pool.tiers.blobs import Blob, Blobs
from ems.pool.tiers.pack_seal import SealKeys
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers.places import PATIENCE, FaultyBlobs

PAGE = 4096
NAMESPACE = "tenant/model/layout"
SECRET = b"a secret that all nodes of the tier have"
KEYS = SealKeys(SECRET, encrypts=False)


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()[:16]


def page(name: object, size: int = PAGE) -> bytes:
    """The bytes of the page of ``name``: random, and the same each time."""
    return random.Random(str(name)).randbytes(size)


def chain(name: str, length: int, size: int = PAGE) -> list[Stored]:
    """Pages of consecutive blocks."""
    pages, parent = [], bytes(NO_PARENT)
    for block in range(length):
        name_of_block = f"{name}/{block}"
        pages.append(Stored(key(name_of_block), parent, None, memoryview(page(name_of_block, size))))
        parent = pages[-1].key
    return pages


def fetch(
    tier: PackTier, keys: Sequence[bytes], namespace: str = NAMESPACE, size: int = PAGE
) -> list[tuple[Outcome, bytes]]:
    into = [memoryview(bytearray(size)) for _ in keys]
    outcomes = tier.load(namespace, [Wanted(one, where) for one, where in zip(keys, into, strict=True)])
    return [(outcome, bytes(where)) for outcome, where in zip(outcomes, into, strict=True)]


def forget(tier: PackTier, meant: ForgetRequest) -> ForgetResult:
    """Take out all that is ``meant``; the sum of what the calls say."""
    pages = size = 0
    deadline = time.monotonic() + PATIENCE
    while True:
        gone = tier.forget(meant)
        pages, size = pages + gone.pages, size + gone.bytes
        if not gone.more:
            return ForgetResult(pages, size)
        assert time.monotonic() < deadline, "there is always more to be forgotten"


class TierBench:
    """What a test of a tier has at hand: an empty place; opening it twice is a restart, or a node beside the first."""

    def blobs(self) -> Blobs:
        """The place of the running test."""
        raise NotImplementedError  # whoever inherits the suite names the place

    def open(self, blobs: Blobs) -> PackTier:
        """A tier in the place ``blobs``."""
        raise NotImplementedError  # whoever inherits the suite opens the kind of tier that is tested

    def opened(self) -> tuple[PackTier, FaultyBlobs]:
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

    def expect(self, tier: PackTier, pages: Sequence[Stored]) -> None:
        found = fetch(tier, [one.key for one in pages])
        assert [outcome for outcome, _ in found] == [Outcome.DONE] * len(pages)
        assert [raw for _, raw in found] == [bytes(one.payload) for one in pages]

    def only_right(self, pages: Sequence[Stored], tier: PackTier | None = None) -> int:
        """How many of ``pages`` come back; each that does has its bytes."""
        if tier is None:
            tier, _ = self.opened()
        found = fetch(tier, [one.key for one in pages])
        right = [outcome is Outcome.DONE for outcome, _ in found]
        for one, (outcome, raw) in zip(pages, found, strict=True):
            assert outcome is not Outcome.DONE or raw == one.payload, "a wrong byte was served"
        return sum(right)
