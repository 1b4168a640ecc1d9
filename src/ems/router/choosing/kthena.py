"""Kthena's scheduler plugins under their names: filters and scores of 0 to 100, added up with weights.

The formulas are those of Kthena's router, as its documentation and its source at version 1.0 give them; whole numbers
are cut off as there.  Where they differ, it is said: equals are told apart by a generator that is passed in, and all
instances that the filters leave are candidates, whether a score names them or not.

What always holds: the same instances, figures and generator give the same choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

WAITING_WEIGHT: Final = 100
"""How many requests that run one counts that was sent and does not run yet."""

TOP_MATCHES: Final = 5
"""Instances with the longest matches that ``prefix-cache`` gives a score."""

UNMEASURED: Final = 50
"""What ``least-latency`` and, unlike Kthena's, ``gpu-usage`` give an instance that did not say what they go by."""

METRICS: Final = b"/metrics"

READ: Final = {"least-request": METRICS, "least-latency": METRICS, "gpu-usage": METRICS, "lora-affinity": b"/v1/models"}
"""The page of engines that a plugin goes by."""


class Measured(NamedTuple):
    """What an instance is known to do: counted here, or read from its metrics."""

    in_flight: int = 0
    """Requests that the router has sent there and that have not ended."""
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    """0 to 1."""
    ttft: float | None = None
    tpot: float | None = None
    matched: float = 0.0
    """The share of the prompt's blocks that it is thought to have, 0 to 1."""
    models: frozenset[str] = frozenset()


class Asked(NamedTuple):
    """What of a request the plugins look at."""

    model: str = ""
    max_waiting: int = 10
    """``maxWaitingRequests`` of the filter ``least-request``."""
    latency_weight: float = 0.5
    """``TTFTTPOTWeightFactor`` of ``least-latency``."""


class Profile(NamedTuple):
    """Which plugins choose: filters, scores with their weights, and arguments."""

    filters: tuple[str, ...]
    weights: Mapping[str, int]
    asked: Asked = Asked()
    """Of no model."""

    @property
    def read(self) -> frozenset[bytes]:
        """The pages of engines that these plugins go by."""
        return frozenset(
            READ[name] for name in (*self.filters, *filter(self.weights.get, self.weights)) if name in READ
        )


Scores = list[int]


def least_request(instances: Sequence[Measured], _: Asked, __: random.Random) -> Scores:
    loads = [one.in_flight + WAITING_WEIGHT * max(one.in_flight - one.running, 0) for one in instances]
    most = max(loads, default=0)
    return [int((most - load) / most * 100) if most else 100 for load in loads]


def least_latency(instances: Sequence[Measured], asked: Asked, _: random.Random) -> Scores:
    ttfts = _normal([one.ttft for one in instances])
    tpots = _normal([one.tpot for one in instances])
    share = asked.latency_weight
    return [
        UNMEASURED if ttft is None or tpot is None else int(share * ttft + (1 - share) * tpot)
        for ttft, tpot in zip(ttfts, tpots, strict=True)
    ]


def _normal(values: Sequence[float | None]) -> list[float | None]:
    """100 for the least, 0 for the most of what was measured."""
    known = [value for value in values if value is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    if least == most:
        return [None if value is None else 100.0 for value in values]
    return [None if value is None else (most - value) / (most - least) * 100 for value in values]


def gpu_usage(instances: Sequence[Measured], _: Asked, __: random.Random) -> Scores:
    return [UNMEASURED if one.kv_usage is None else int((1 - one.kv_usage) * 100) for one in instances]


def prefix_cache(instances: Sequence[Measured], _: Asked, __: random.Random) -> Scores:
    least = sorted((one.matched for one in instances), reverse=True)[:TOP_MATCHES][-1:]
    return [int(one.matched * 100) if one.matched >= least[0] else 0 for one in instances]


def kvcache_aware(instances: Sequence[Measured], _: Asked, __: random.Random) -> Scores:
    return [int(one.matched * 100) for one in instances]


def at_random(instances: Sequence[Measured], _: Asked, draw: random.Random) -> Scores:
    return [draw.randint(0, 100) for _ in instances]


def short_queue(one: Measured, asked: Asked) -> bool:
    return one.waiting < asked.max_waiting


def has_adapter(one: Measured, asked: Asked) -> bool:
    return not asked.model or asked.model in one.models


SCORES: Final[Mapping[str, Callable[[Sequence[Measured], Asked, random.Random], Scores]]] = {
    "least-request": least_request,
    "least-latency": least_latency,
    "gpu-usage": gpu_usage,
    "prefix-cache": prefix_cache,
    "kvcache-aware": kvcache_aware,
    "random": at_random,
}
FILTERS: Final[Mapping[str, Callable[[Measured, Asked], bool]]] = {
    "least-request": short_queue,
    "lora-affinity": has_adapter,
}


def choose(
    instances: Sequence[Measured], asked: Asked, filters: Sequence[str], weights: Mapping[str, int], draw: random.Random
) -> int | None:
    """Return the place of the instance with the highest sum; None when the filters leave none."""
    left = [place for place, one in enumerate(instances) if all(FILTERS[name](one, asked) for name in filters)]
    if not left:
        return None
    sums = [0] * len(left)
    for name, weight in weights.items():
        for place, score in enumerate(SCORES[name]([instances[one] for one in left], asked, draw)):
            sums[place] += weight * score
    best = max(sums)
    return draw.choice([one for one, total in zip(left, sums, strict=True) if total == best])
