"""How fast a tier is, and when it is not worth asking."""

from __future__ import annotations

from ems.pool.movement.speed import LEAST_SAMPLES, TRY_EVERY, TierSpeed

MB = 1 << 20


def taught(seconds_a_mb: float, readers: int = 1) -> TierSpeed:
    speed = TierSpeed(readers)
    for size in range(1, 2 * LEAST_SAMPLES):
        speed.fetched.add(size * MB, 0.01 + size * seconds_a_mb, 0.0)
    return speed


def test_nothing_is_claimed_without_measurements() -> None:
    speed = TierSpeed(1)
    assert speed.expected(MB, 0, MB, 0.0) == 0.0
    assert speed.worth(speed.expected(MB, 0, MB, 0.0), 1e-9)


def test_what_waits_before_it_counts() -> None:
    speed = taught(0.1)
    alone, behind = speed.expected(4 * MB, 0, 8 * MB, 0.0), speed.expected(4 * MB, 40 * MB, 8 * MB, 0.0)
    assert 0.3 < alone < 0.5
    assert behind > 10 * alone


def test_threads_share_the_work() -> None:
    assert taught(0.1, 4).expected(64 * MB, 0, 8 * MB, 0.0) < taught(0.1, 1).expected(64 * MB, 0, 8 * MB, 0.0) / 3


def test_a_tier_slower_than_computing_is_not_used_but_tried_now_and_then() -> None:
    speed = taught(1.0)
    seconds = speed.expected(8 * MB, 0, 8 * MB, 0.0)
    answers = [speed.worth(seconds, seconds / 2) for _ in range(TRY_EVERY)]
    assert answers == [False] * (TRY_EVERY - 1) + [True]
    assert speed.reluctance.refused == TRY_EVERY - 1
    assert speed.worth(seconds, 2 * seconds)
    assert speed.worth(seconds, 0.0), "nobody knows what computing takes"
