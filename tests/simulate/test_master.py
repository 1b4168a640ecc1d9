"""The model of the master under generated histories, and what of Mooncake's ways it follows."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ems.simulate.master import LEASE_SECONDS, Master
from ems.simulate.plan import CHOICES, Placement

steps = st.lists(
    st.tuples(st.sampled_from(["put"] * 3 + ["lookup", "unmount", "mount"]), st.integers(0, 60), st.integers(0, 4)),
    max_size=120,
)  # fmt: skip


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@given(st.sampled_from(CHOICES["placement"]), st.integers(1, 3), st.integers(1, 8), steps)
def test_places_and_blocks_agree_whatever_happens(
    placement: Placement, replicas: int, places: int, history: list[tuple[str, int, int]]
) -> None:
    master = Master(5, places, placement, replicas)
    mounted, now = set(range(5)), 0.0
    for what, number, host in history:
        now += 0.5
        leased = set(master._leases)
        if what == "put" and key(number) not in master.blocks:
            put = master.put(key(number), host, now)
            assert len(set(put)) == len(put) <= replicas
            assert set(put) <= mounted
            for one in leased & {name for name, until in master._leases.items() if until > now}:
                assert one in master.blocks
        elif what == "lookup":
            found = master.lookup([key(number), key(number + 1)], now)
            assert [bool(one) for one in found] == [key(number) in master.blocks, key(number + 1) in master.blocks]
        elif what == "unmount":
            master.unmount(host)
            mounted.discard(host)
        elif what == "mount":
            master.mount(host)
            mounted.add(host)
        lying = Counter(one for where in master.blocks.values() for one in where)
        assert set(lying) <= mounted
        assert all(master.used(one) == lying[one] <= places for one in range(5))
        assert set(master._leases) <= set(master.blocks)


def test_eviction_begins_above_the_high_watermark_with_what_was_not_used_for_longest() -> None:
    master = Master(1, 100, "random", 1)
    for number in range(91):
        master.put(key(number), 0, 0.0)
    master.lookup([key(0)], 1.0)

    master.put(key(100), 0, 20.0)

    assert key(0) in master.blocks
    assert [number for number in range(91) if key(number) not in master.blocks] == [1, 2, 3, 4, 5, 6]


def test_what_is_leased_stays_and_puts_are_refused() -> None:
    master = Master(1, 10, "random", 1)
    keys = [key(number) for number in range(10)]
    for one in keys:
        master.put(one, 0, 0.0)
    master.lookup(keys, 1.0)

    assert master.put(key(50), 0, 2.0) == ()
    assert master.refused == 1
    assert set(master.blocks) == set(keys)
    assert master.put(key(50), 0, 1.0 + LEASE_SECONDS) == (0,)


def test_placement() -> None:
    own, free = Master(20, 100, "own-host", 1), Master(20, 100, "free-ratio", 1)
    spread = Master(20, 100, "random", 1)

    assert {own.put(key(number), 7, 0.0) for number in range(50)} == {(7,)}
    for number in range(1000):
        free.put(key(number), 0, 0.0)
        spread.put(key(number), 0, 0.0)
    uneven = [max(map(master.used, range(20))) - min(map(master.used, range(20))) for master in (free, spread)]
    assert uneven[0] < uneven[1]
