"""The replay of a trace over simulated engines: it gives the same again, and the router's chooser finds prefixes."""

from __future__ import annotations

import argparse
import random

from benchmarks.routing import Line, Replay, Result

ARGS = argparse.Namespace(seed=0, engines=4, speed=1.0, prefill_rate=8000.0, cache_tokens=100_000)


def conversations() -> list[Line]:
    draw = random.Random(3)
    lines, known = [], [[one] for one in range(40)]
    for number in range(400):
        blocks = known[draw.randrange(len(known))]
        blocks.append(1000 + number)
        lines.append(Line(number * 200.0, 512 * len(blocks), 50, list(blocks)))
    return lines


def replayed(policy: str) -> Result:
    return Replay(conversations(), ARGS, policy).run()


def test_the_router_finds_more_prefixes_than_counting_requests_does() -> None:
    ems, least = replayed("ems"), replayed("least-request")

    assert ems == replayed("ems")
    assert ems.hit_share > 1.5 * least.hit_share
    assert ems.ttft_mean < least.ttft_mean
    assert 0 < least.hit_share < ems.hit_share < 1
