"""What an engine says of itself on ``/metrics`` and ``/v1/models``.

The series are vLLM's and SGLang's.  What data-parallel ranks say is added up, their KV usage is averaged.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from statistics import fmean
from typing import Final

import msgspec
from msgspec import Raw

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
