"""Packs that turn out bad are mended once a look, whatever the place says of what was written for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ems.errors import TierFailed
from ems.pool.tiers.answers import ForgetRequest, Outcome
from ems.pool.tiers.packs import PackTier
from ems.pool.tiers.repair import Quarantine, mend
from tests.faults.faulty_store import FaultyStore
from tests.faults.points import Points
from tests.faults.times import Times
from tests.kit.tiers import KEYS, NAMESPACE, FaultyBlobs, chain, fetch
from tests.pool.tiers.memory_blobs import MemoryBlobs


@pytest.mark.timeout(20)
def test_a_place_that_gives_the_bytes_of_another_blob_is_not_mended_for_ever() -> None:
    times, points = Times(), Points()
    place = FaultyStore(times, points, "dir")
    for number in (2, 3):
        PackTier("lies", place, KEYS, clock=times.wall).store(NAMESPACE, chain(str(number), number))
    last = list(place.contents)[-1]
    place.contents[last] = (
        place.contents[last][:-500] + bytes([place.contents[last][-500] ^ 1]) + place.contents[last][-499:]
    )
    written = points.seen["dir's blob"]
    place.wrong.add("gives another's bytes")
    tier = PackTier("lies", place, KEYS, clock=times.wall)
    for _ in range(2):
        tier.maintain()
    assert points.seen["dir's blob"] - written <= 3


def test_a_cleared_pack_that_could_not_be_removed_is_not_mended() -> None:
    place = MemoryBlobs()
    faulty, pages = FaultyBlobs(place), chain("a", 3)
    tier = PackTier("dir", faulty, KEYS)
    tier.maintain()
    tier.store(NAMESPACE, pages)
    (name,) = place.contents
    place.contents[name] = (
        place.contents[name][:-500] + bytes([place.contents[name][-500] ^ 1]) + place.contents[name][-499:]
    )
    assert [outcome for outcome, _ in fetch(tier, [page.key for page in pages])][-1] is Outcome.CORRUPT
    faulty.failing = True
    with pytest.raises(TierFailed):
        tier.forget(ForgetRequest(NAMESPACE))
    faulty.failing = False
    tier.maintain()
    assert tier.holds(NAMESPACE, [pages[0].key]) == 0
    assert not [left for left in place.contents if left.endswith(".pack")]


class ClearedMeanwhile(MemoryBlobs):
    """A place where a node removes a pack while another process writes its good pages anew."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self.contents.clear()
        super().put(name, parts)


def test_a_pack_that_is_cleared_while_it_is_mended_does_not_come_back() -> None:
    place = ClearedMeanwhile()
    PackTier("dir", place, KEYS).store(NAMESPACE, chain("a", 3))
    (name,) = place.contents
    place.contents[name] = (
        place.contents[name][:-500] + bytes([place.contents[name][-500] ^ 1]) + place.contents[name][-499:]
    )
    assert mend(place, place.put, name, KEYS, Quarantine(place, 0)).kind == "gone"
    assert place.contents == {}
