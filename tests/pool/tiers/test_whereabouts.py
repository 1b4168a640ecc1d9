"""What tiers add to the reasons of misses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ems.pool.reasons.words import Reason
from ems.pool.tiers.answers import revised, why
from tests.pool.brain import chain

KEYS = chain("x", 6)


class Shelf:
    def __init__(self, *held: int, reads: bool = True, remote: bool = False) -> None:
        self.reads = reads
        self.remote = remote
        self._held = {KEYS[position] for position in held}

    def holds(self, namespace: str, keys: Sequence[bytes]) -> int:
        assert namespace == "a"
        return next((count for count, key in enumerate(keys) if key not in self._held), len(keys))


@pytest.mark.parametrize(
    ("tiers", "promoting", "reason"),
    [
        ([], False, Reason.EVICTED_FULL),
        ([Shelf(1)], False, Reason.EVICTED_FULL),
        ([Shelf(0)], True, Reason.LOWER_TIER),
        ([Shelf(0)], False, Reason.DEAR),
        ([Shelf(0, reads=False)], False, Reason.TIER_OFFLINE),
        ([Shelf(0, reads=False), Shelf(0)], False, Reason.DEAR),
    ],
)
def test_a_page_that_a_tier_has_is_not_simply_gone(tiers: list[Shelf], promoting: bool, reason: Reason) -> None:
    assert why(tiers, "a", KEYS[0], Reason.EVICTED_FULL.code, promoting=promoting) == reason.code


@pytest.mark.parametrize(
    ("tiers", "before", "reason"),
    [
        ([Shelf(0, remote=True)], Reason.EVICTED_FULL, Reason.LOCAL_ONLY),
        ([Shelf(remote=True)], Reason.NEVER_STORED, Reason.LOCAL_ONLY),
        ([Shelf(remote=True)], Reason.BEING_WRITTEN, Reason.BEING_WRITTEN),
        ([Shelf(remote=True)], Reason.CLEARED, Reason.CLEARED),
        ([Shelf(0, remote=True, reads=False)], Reason.NEVER_STORED, Reason.NEVER_STORED),
        ([Shelf(0), Shelf(0, remote=True)], Reason.NEVER_STORED, Reason.DEAR),
        ([Shelf()], Reason.NEVER_STORED, Reason.NEVER_STORED),
    ],
)
def test_who_reads_this_host_only_is_told_that_others_were_not_asked(
    tiers: list[Shelf], before: Reason, reason: Reason
) -> None:
    assert why(tiers, "a", KEYS[0], before.code, promoting=False, local_only=True) == reason.code
    explained = revised(tiers, "a", KEYS[:1], bytes([before.code]), local_only=True)
    assert explained == bytes([(Reason.LOWER_TIER if reason is Reason.DEAR else reason).code])


def test_what_tiers_have_takes_the_place_of_what_memory_knows() -> None:
    gone, gap, written = Reason.EVICTED_FULL.code, Reason.GAP.code, Reason.BEING_WRITTEN.code
    lower, offline = Reason.LOWER_TIER.code, Reason.TIER_OFFLINE.code
    codes = bytes([0, gone, gap, gone, written, gone])
    assert revised([], "a", KEYS, codes) == codes
    assert revised([Shelf(0, 1, 2, 4)], "a", KEYS, codes) == bytes([0, lower, gap, gone, written, gone])
    both = [Shelf(1), Shelf(1, 3, reads=False)]
    assert revised(both, "a", KEYS, codes) == bytes([0, lower, gap, offline, written, gone])


@pytest.mark.parametrize(
    ("tiers", "before", "looked_up", "explained"),
    [
        ([Shelf(remote=True)], Reason.NEVER_STORED, Reason.NEVER_STORED, Reason.NOT_ASKED),
        ([Shelf(remote=True)], Reason.EVICTED_FULL, Reason.EVICTED_FULL, Reason.NOT_ASKED),
        ([Shelf(remote=True, reads=False)], Reason.NEVER_STORED, Reason.TIER_OFFLINE, Reason.TIER_OFFLINE),
        ([Shelf(remote=True, reads=False)], Reason.CLEARED, Reason.CLEARED, Reason.CLEARED),
        ([Shelf(reads=False)], Reason.NEVER_STORED, Reason.NEVER_STORED, Reason.NEVER_STORED),
        ([Shelf(reads=False), Shelf(remote=True)], Reason.NEVER_STORED, Reason.NEVER_STORED, Reason.NOT_ASKED),
    ],
)
def test_what_other_hosts_may_have_was_not_never_stored(
    tiers: list[Shelf], before: Reason, looked_up: Reason, explained: Reason
) -> None:
    """A lookup asked them, unless they are left alone; who explains asks nobody."""
    assert why(tiers, "a", KEYS[0], before.code, promoting=False) == looked_up.code
    assert revised(tiers, "a", KEYS[:1], bytes([before.code])) == bytes([explained.code])
