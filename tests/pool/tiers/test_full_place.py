"""A place that is full of a tier's own packs: it gives up some of them for whatever it must write."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from ems.errors import TierFailed
from ems.pool.tiers.answers import Outcome
from ems.pool.tiers.pack_store import SNAPSHOT_SECONDS
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers import KEYS, NAMESPACE, chain, fetch
from tests.pool.tiers.memory_blobs import MemoryBlobs


class Small(MemoryBlobs):
    """A place with room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def fill(self) -> None:
        """There is room for what is there, and no more."""
        self._room = sum(map(len, self.contents.values()))

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        if sum(map(len, (*self.contents.values(), *parts))) > self._room:
            raise TierFailed("no space left on device") from OSError(errno.ENOSPC, "no space left on device")
        super().put(name, parts)


@pytest.fixture
def blobs() -> Small:
    made = MemoryBlobs()
    PackTier("one", made, KEYS).store(NAMESPACE, chain("0", 1))
    return Small(4 * sum(map(len, made.contents.values())))


@pytest.fixture
def now() -> list[float]:
    return [1e9]


@pytest.fixture
def tier(blobs: Small, now: list[float]) -> PackTier:
    """A tier that has filled its place."""
    one = PackTier("full", blobs, KEYS, clock=lambda: now[0])
    one.maintain()
    for number in range(4):
        one.store(NAMESPACE, chain(str(number), 1))
    assert len(blobs.contents) == 4
    return one


def test_a_probe_of_a_full_place_finds_that_it_works(tier: PackTier, blobs: Small) -> None:
    tier.probe()
    assert tier.figures()["pages"] == 3
    assert len(blobs.contents) == 3, "the probe is gone"


def test_the_catalogue_is_written_to_a_full_place(tier: PackTier, now: list[float]) -> None:
    now[0] += SNAPSHOT_SECONDS
    tier.maintain()
    assert tier.figures()["pages"] == 3


def test_what_is_good_of_a_bad_pack_is_kept_in_a_full_place(blobs: Small) -> None:
    blobs.contents.clear()
    tier = PackTier("full", blobs, KEYS)
    tier.maintain()
    for name in "abc":
        tier.store(NAMESPACE, chain(name, 1))
    bad = set(blobs.contents)
    tier.store(NAMESPACE, chain("d", 2))
    (bad_pack,) = set(blobs.contents) - bad
    raw = blobs.contents[bad_pack]
    blobs.contents[bad_pack] = raw[:-500] + bytes([raw[-500] ^ 1]) + raw[-499:]
    blobs.fill()
    assert [outcome for outcome, _ in fetch(tier, [page.key for page in chain("d", 2)])][1] is Outcome.CORRUPT
    tier.maintain()
    assert tier.holds(NAMESPACE, [chain("d", 2)[0].key]) == 1
    assert fetch(tier, [chain("d", 2)[0].key])[0][0] is Outcome.DONE


def test_a_full_place_that_was_misread_makes_room_once_it_is_read_right(tier: PackTier, blobs: Small) -> None:
    del tier
    right = dict(blobs.contents)
    blobs.contents.update({name: bytes(len(raw)) for name, raw in right.items()})
    next_life = PackTier("full", blobs, KEYS)
    next_life.maintain()
    assert next_life.figures()["unreadable"] == 4
    with pytest.raises(TierFailed):
        next_life.probe()
    blobs.contents.update(right)
    next_life.probe()
    assert next_life.figures()["pages"] == 3


def test_a_full_place_that_was_never_read_makes_room(tier: PackTier, blobs: Small) -> None:
    del tier
    next_life = PackTier("full", blobs, KEYS)
    next_life.probe()
    assert next_life.figures()["pages"] == 3
