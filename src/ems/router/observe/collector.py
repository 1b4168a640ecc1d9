"""The metrics page's part about requests: Kthena's names and labels, so that its dashboards work, and some of our own.

What Kthena has no name for is called ``ems_router_*``.  Everything is read from series and records when a page is asked
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ems.router.metrics import family
from ems.router.observe.record import Record
from ems.router.observe.series import NONE, UNKNOWN, AllSeries, Labels

_BACKEND: Final = ("model_route", "backend_type", "backend_name", "upstream_model")
_MODEL: Final = ("model",)
_PHASE: Final = ("model", "path", "status_code")
_USER: Final = ("model", "user_id")
_ALL: Final = ("_all",)
_OF_TOKENS: Final = ("model", "path", *_BACKEND, "token_type")
_TOKENS: Final = {"input_tokens": ("input",), "output_tokens": ("output",)}

_Sums = tuple[tuple[str, str, tuple[str, ...], Mapping[str, tuple[str, ...]]], ...]
"""Names, texts, labels, and which attributes of series are summed up, each with values of the labels beyond theirs."""

_COUNTS: Final[_Sums] = (
    ("kthena_router_requests", "Requests by how they ended", Labels._fields, {"requests": ()}),
    ("kthena_router_tokens", "Tokens of prompts (estimated) and of answers", _OF_TOKENS, _TOKENS),
    (
        "kthena_router_rate_limit_exceeded",
        "Requests refused by a limit of tokens",
        ("model", "path", "limit_type"),
        {"over_input": ("input_tokens",), "over_output": ("output_tokens",)},
    ),
    ("kthena_router_fairness_queue_dequeue", "Requests that were given a place", _USER, {"entered": _ALL}),
    ("kthena_router_fairness_queue_cancelled", "Requests that left the queue without one", _USER, {"cancelled": _ALL}),
    (
        "ems_router_affinity_requests",
        "Requests of a session by whether they came to where it was before",
        ("model", "outcome"),
        {"affinity_hits": ("hit",), "affinity_misses": ("miss",)},
    ),
)
_TIMES: Final[_Sums] = (
    ("kthena_router_request_duration_seconds", "Duration of requests", (*_PHASE, *_BACKEND), {"duration": ()}),
    ("kthena_router_request_prefill_duration_seconds", "Duration of prefill", _PHASE, {"prefill": ()}),
    ("kthena_router_request_decode_duration_seconds", "Duration of decode", _PHASE, {"decode": ()}),
    ("kthena_router_fairness_queue_duration_seconds", "Time in the queue", _USER, {"queued": _ALL}),
    ("kthena_router_prefix_cache_match_ratio", "Share of prompts found in caches", _MODEL, {"match": ()}),
    (
        "ems_router_time_to_first_token_seconds",
        "From a request to its answer's first byte, answered ones",
        _MODEL,
        {"first_token": ()},
    ),
    ("ems_router_handoff_seconds", "From a prefill's answer to decode's first byte", _MODEL, {"handoff": ()}),
    ("ems_router_queue_seconds", "Time in the queue", _MODEL, {"queued": ()}),
)


class RequestCollector(Collector):
    """Turns series into metric families."""

    def __init__(self, series: AllSeries, active: Iterable[Record]) -> None:
        self._series = series
        self._active = active

    def collect(self) -> Iterator[Metric]:
        for name, text, labels, attributes in _COUNTS:
            yield family("counter", name, text, labels, self._summed(labels, attributes))
        for name, text, labels, attributes in _TIMES:
            yield family("histogram", name, text, labels, self._summed(labels, attributes))
        for name, text, labels, now in self._now():
            yield family("gauge", f"kthena_router_{name}", text, labels, now)

    def _summed(self, labels: tuple[str, ...], attributes: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
        sums: dict[tuple[str, ...], Any] = {}
        for attribute, further in attributes.items():
            kept = [Labels._fields.index(label) for label in labels[: len(labels) - len(further)]]
            for full, series in self._series.by_labels.items():
                key = (*(full[place] for place in kept), *further)
                value = getattr(series, attribute)
                sums[key] = sums[key] + value if key in sums else value
        return sums

    def _now(self) -> Iterator[tuple[str, str, tuple[str, ...], Counter[Any]]]:
        active = [(self._name(one.model), one) for one in self._active]
        yield "active_requests", "Requests not yet answered, queued ones too", (), Counter({(): len(active)})
        being = Counter((model,) for model, _ in active)
        yield "active_downstream_requests", "Requests not yet answered, queued ones too", _MODEL, being
        sent = [one for _, one in active if one.hops]
        there = Counter(
            (one.server or NONE, one.route or NONE, one.backend_type, one.backend or NONE, one.upstream_model or NONE)
            for one in sent
        )
        yield "active_upstream_requests", "Requests that an engine works on", ("model_server", *_BACKEND), there
        waiting = Counter((model, *_ALL) for model, one in active if not one.entered)
        yield "fairness_queue_size", "Requests that wait for a place", _USER, waiting
        running = Counter((model,) for model, one in active if one.entered)
        yield "fairness_queue_inflight", "Requests that have a place", _MODEL, running

    def _name(self, model: str) -> str:
        return model if model in self._series.models else UNKNOWN
