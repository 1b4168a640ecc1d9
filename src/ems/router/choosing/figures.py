"""What an engine says of itself on ``/metrics`` and ``/v1/models``, for those of Kthena's plugins that go by it.

The series are vLLM's and SGLang's.  What data-parallel ranks say is added up, their KV usage is averaged.  A latency is
the mean of what was observed since the page before; while nothing new is observed it stays as it was.

What always holds: a page that makes no sense changes nothing, and what was said counts for :data:`FRESH` seconds.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Raw

from ems.router.choosing.kthena import METRICS, Measured

FRESH: Final = 10.0
"""Seconds for which a page counts."""

_LARGEST: Final = 2.0**53

_LATENCIES: Final = (("time_to_first_token_seconds", "ttft"), ("inter_token_latency_seconds", "tpot"))
_PARTS: Final = ("sum", "count")

_SERIES: Final = {
    "kv_cache_usage_perc": "kv_usage",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "token_usage": "kv_usage",
    "num_running_reqs": "running",
    "num_queue_reqs": "waiting",
    **{f"{series}_{part}": f"{name}_{part}" for series, name in _LATENCIES for part in _PARTS},
}
"""The first three are vLLM's, the next three SGLang's, and the latencies have the same names in both."""

# Labels do not matter.  The time that this takes is bounded whatever the page has, as it is not with a general parser.
_SAMPLES = re.compile(rf"\n(?:vllm|sglang):({'|'.join(_SERIES)})(?:\{{.{{0,1024}}\}})? (\S{{1,32}})".encode())


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[Raw]


_model = msgspec.json.Decoder(_Model)
_model_list = msgspec.json.Decoder(_ModelList)


def models_of(page: bytes) -> dict[str, Raw]:
    """Return the models of a list by their names; of a page that is no such list none."""
    try:
        return {_model.decode(model).id: model for model in _model_list.decode(page).data}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def metrics_of(page: bytes) -> dict[str, float]:
    """Return the figures that a page of metrics has, by their names here.

    :raises ValueError: there are none, or they are not what an engine has to say.
    """
    found = defaultdict(list)
    for series, text in _SAMPLES.findall(b"\n" + page):
        value = float(text)
        if not 0 <= value <= _LARGEST:
            raise ValueError(f"its {series.decode()} is {value}")
        found[_SERIES[series.decode()]].append(value)
    if not found:
        raise ValueError("it has no figures of vLLM or SGLang")
    return {name: min(fmean(of), 1.0) if name == "kv_usage" else math.fsum(of) for name, of in found.items()}


class Figures:
    """What one engine said last; times are seconds on one monotonic clock."""

    __slots__ = ("_listed_at", "_models", "_said", "_said_at")

    def __init__(self) -> None:
        self._said: Mapping[str, float] = {}
        self._said_at = -math.inf
        self._models: frozenset[str] = frozenset()
        self._listed_at = -math.inf

    def take(self, path: bytes, page: bytes, now: float) -> None:
        """Take in the page that the engine has under a path.

        :raises ValueError: it makes no sense.
        """
        if path != METRICS:
            models = frozenset(models_of(page))
            if not models:
                raise ValueError("it lists no models")
            self._models, self._listed_at = models, now
            return
        new, old = metrics_of(page), self._current(now)
        for name in ("ttft", "tpot"):
            count, total = new.get(f"{name}_count", 0.0), new.get(f"{name}_sum", 0.0)
            if count < old.get(f"{name}_count", 0.0):
                old = {}  # the engine began anew
            more = count - old.get(f"{name}_count", 0.0)
            if more:
                new[name] = max(total - old.get(f"{name}_sum", 0.0), 0.0) / more
            elif name in old:
                new[name] = old[name]
        self._said, self._said_at = new, now

    def _current(self, now: float) -> Mapping[str, float]:
        return self._said if now - self._said_at <= FRESH else {}

    def measured(self, in_flight: int, matched: float, now: float) -> Measured:
        """Join what the engine says with what the router knows; all that runs counts as running where it is silent."""
        said = self._current(now)
        return Measured(
            in_flight,
            int(said.get("running", in_flight)),
            int(said.get("waiting", 0)),
            said.get("kv_usage"),
            said.get("ttft"),
            said.get("tpot"),
            matched,
            self._models if now - self._listed_at <= FRESH else frozenset(),
        )
