"""Two nodes on one place that both wrote a page: it is found as long as one of the packs that have it is there."""

from __future__ import annotations

from ems.pool.keys import NO_PARENT
from ems.pool.tiers.answers import ForgetRequest, Outcome, Stored
from ems.pool.tiers.packs import PackTier
from tests.kit.tiers import KEYS, fetch, forget, key, page
from tests.pool.tiers.memory_blobs import MemoryBlobs

NAMESPACE = "t/m/l"
SIZE = 256


def stored(name: str) -> Stored:
    return Stored(key(name), bytes(NO_PARENT), None, memoryview(page(name, SIZE)))


def packs(place: MemoryBlobs) -> list[str]:
    return [name for name in place.contents if name.endswith(".pack")]


def written_twice(place: MemoryBlobs) -> tuple[PackTier, str]:
    """A node that knows "a" to be in two packs, and the name of the one in which it finds it."""
    one, other = PackTier("one", place, KEYS), PackTier("other", place, KEYS)
    one.store(NAMESPACE, [stored("a")])
    (first,) = packs(place)
    other.store(NAMESPACE, [stored("a"), stored("b")])
    one.maintain()
    assert len(packs(place)) == 2
    return one, first


def outcomes(tier: PackTier, *names: str) -> list[Outcome]:
    return [outcome for outcome, _ in fetch(tier, [key(name) for name in names], NAMESPACE, SIZE)]


def test_a_page_is_found_in_the_other_pack_when_the_first_one_leaves() -> None:
    place = MemoryBlobs()
    tier, first = written_twice(place)
    del place.contents[first]
    tier.maintain()
    assert tier.holds(NAMESPACE, [key("a"), key("b")]) == 2
    assert outcomes(tier, "a", "b") == [Outcome.DONE, Outcome.DONE]


def test_a_page_is_found_in_the_other_pack_when_the_first_one_turns_out_bad() -> None:
    place = MemoryBlobs()
    tier, first = written_twice(place)
    place.contents[first] = place.contents[first][:-SIZE] + bytes(SIZE)
    assert outcomes(tier, "a") == [Outcome.CORRUPT]
    assert outcomes(tier, "a") == [Outcome.DONE]


def test_what_is_spared_stays_in_the_other_pack_when_the_first_one_has_left() -> None:
    place = MemoryBlobs()
    tier, first = written_twice(place)
    del place.contents[first]
    tier.maintain()
    forget(tier, ForgetRequest(NAMESPACE, 0.0, [key("a")]))
    fresh = PackTier("fresh", place, KEYS)
    fresh.maintain()
    assert outcomes(fresh, "a", "b") == [Outcome.DONE, Outcome.MISSING]
    assert tier.holds(NAMESPACE, [key("a")]) == 1


def test_what_is_also_in_a_pack_that_was_used_lately_is_not_counted() -> None:
    place, time = MemoryBlobs(), 1000.0
    tier, other = PackTier("one", place, KEYS, clock=lambda: time), PackTier("other", place, KEYS, clock=lambda: time)
    tier.store(NAMESPACE, [stored("a"), stored("c")])
    (first,) = packs(place)
    place.modified[first] = 1000.0
    time = 2000.0
    other.store(NAMESPACE, [stored("a"), stored("b")])
    (second,) = set(packs(place)) - {first}
    place.modified[second] = 2000.0
    tier.maintain()
    meant = ForgetRequest(NAMESPACE, 500.0, [])
    assert tier.forget(meant, dry_run=True).pages == 1
    assert forget(tier, meant).pages == 1
    assert [tier.holds(NAMESPACE, [key(name)]) for name in "abc"] == [1, 1, 0]


def test_a_second_copy_of_what_is_spared_goes() -> None:
    place = MemoryBlobs()
    tier, first = written_twice(place)
    gone = forget(tier, ForgetRequest(NAMESPACE, 0.0, [key("a")]))
    assert (gone.pages, packs(place)) == (1, [first])
    assert tier.holds(NAMESPACE, [key("a")]) == 1
